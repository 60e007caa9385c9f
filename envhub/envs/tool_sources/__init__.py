"""Where the tools of an episode come from, by name; a new one is one file plus one line here."""

from __future__ import annotations

from typing import Final

TOOL_SOURCES: Final[dict[str, str]] = {
    "functions": "envhub.envs.tool_sources.functions:FunctionSource",
    "mcp": "envhub.envs.tool_sources.mcp.source:McpSource",
    "openapi": "envhub.envs.tool_sources.openapi:OpenApiSource",
}
