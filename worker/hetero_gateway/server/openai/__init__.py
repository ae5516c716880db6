"""The HTTP door: an endpoint that clients of the OpenAI API can talk to, over the same engine.

    schema     fields of bodies                     answers       answers and errors, as JSON objects
    requests   bodies to the engine's requests      call          one call, whole or in chunks
    endpoint   the ASGI application                 http_server   its server, and bounds of what it receives
    tokens     bodies of calls about tokens     embeddings    their call, and their making for all doors

It knows no gRPC. Fields that the OpenAI API does not have (cache salts, priorities, min_p, regular expressions, ...)
have the names that vLLM gave them. Fields that are not known are left out, and the answer names them in a header.
"""
