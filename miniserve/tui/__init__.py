"""The terminal chat: `uv run tui.py`.

From the screen down, each file to be read alone:

    main.py             one run: flags, signals, the life of a spawned server
    app.py, widgets.py  the screen and the conversation; the only ones that know Textual
    meter.py            an answer's events to text, reasoning and numbers
    client.py           the calls over HTTP; the only one that sends and receives
    spawned_server.py   a server as a child process
    settings.py         the flags
    errors.py           what went wrong, in words for the user

Talks to any OpenAI-compatible server. Of miniserve it imports nothing, and knows no more than `/health`, the flags
`--host` and `--port`, and `$MINISERVE_API_KEY`.
"""
