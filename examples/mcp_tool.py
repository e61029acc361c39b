"""A tool of an MCP server over stdio, by the package `mcp` 2. A class of verl's BaseTool, with the
file

tools:
  - class_name: examples.mcp_tool.MCPTool
    config: {command: python, args: [server.py], tool: weather}

as rollout.environment.tool_config_path. Each worker process starts the server, once for each of its
tools.
"""

import asyncio
from typing import Any

from mcp import Client, StdioServerParameters
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class MCPTool(BaseTool):
    """One of the server's tools."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self._server = StdioServerParameters(command=config["command"], args=config.get("args", []))
        self._client: asyncio.Future[Client] | None = None
        super().__init__(config, tool_schema or asyncio.run(self._schema(config["tool"])))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[Any, float, dict]:
        """Call the tool."""
        if self._client is None:
            self._client = asyncio.get_running_loop().create_future()
            self._connection = asyncio.create_task(self._connect())
        client = await asyncio.shield(self._client)
        result = await client.call_tool(self.name, parameters)
        text = "\n".join(part.text for part in result.content if part.type == "text")
        if result.is_error:
            raise RuntimeError(text)
        return ToolResponse(text=text), 0.0, {}

    async def _connect(self) -> None:
        """Keep the connection of all conversations, in one task, as the client's context demands
        it."""
        assert self._client is not None
        try:
            async with Client(self._server) as client:
                self._client.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:
            if not self._client.done():
                self._client.set_exception(error)

    async def _schema(self, name: str) -> OpenAIFunctionToolSchema:
        async with Client(self._server) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        function = {
            "name": name,
            "description": tools[name].description,
            "parameters": tools[name].input_schema,
        }
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
