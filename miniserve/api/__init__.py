"""The HTTP side: OpenAI's API over an `AsyncEngine`. The only importer of fastapi, starlette and pydantic."""
