#!/usr/bin/env bash
# Asks a running server through the clients that people use, each in an environment of its own, without a setting that
# OpenAI would not need. Exit code 1 if one of them fails; the others are still run.
#
#     demos/clients/run_all.sh [base-url] [model]

set -u
base_url="${1:-http://127.0.0.1:8000/v1}"
model="${2:-smollm2}"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
failed=()
export LITELLM_LOCAL_MODEL_COST_MAP=True # it would fetch a price list at import, from elsewhere

python_client() { # package, script
    uv run --quiet --isolated --no-project --with "$1" "$here/$2" "$base_url" "$model" || failed+=("$1")
}

node_client() ( # node looks for packages beside the script, so the script goes where they are
    folder="$(mktemp -d)"
    trap 'rm -rf "$folder"' EXIT
    cp "$here/openai_sdk.mjs" "$folder" && cd "$folder" \
        && npm install --silent --no-save openai && node openai_sdk.mjs "$base_url" "$model"
)

python_client openai openai_sdk.py
node_client || failed+=("openai (node)")
python_client langchain-openai langchain_sdk.py
python_client litellm litellm_sdk.py

if ((${#failed[@]})); then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
echo "all clients work"
