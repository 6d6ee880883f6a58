"""A server in OpenAI's terms: requests over HTTP, decoded by any method, with vLLM's figures of speculation."""
