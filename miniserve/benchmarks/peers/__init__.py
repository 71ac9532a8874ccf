"""miniserve against other servers: each set up from public packages, and all under the same HTTP load, taking turns.

    uv run python -m miniserve.benchmarks.peers setup    # once: builds and installs the peers, writes the models
    uv run python -m miniserve.benchmarks.peers run      # measures, and writes the table, the plot and all numbers

Read `arms` for what is compared and with which settings, `load` for what is measured, `rounds` for the order.
"""
