"""Tools of an MCP server, by the package ``mcp``: over stdio or streamable HTTP."""

import logging

# They log each request, and tracebacks of what a server does wrong; ``source`` says it in one line.
for name in ("mcp", "httpx2"):
    logging.getLogger(name).setLevel(logging.CRITICAL)
