"""The engine ``vllm``: vLLM's AsyncLLM in the server's process."""
