"""The second door: an HTTP endpoint that clients of the OpenAI API can talk to, over the same engine.

    schema     what a body may hold                 answers    what is answered, as JSON objects
    requests   bodies to the engine's requests      failures   errors as HTTP statuses and error objects
    endpoint   the ASGI application                 listener   its HTTP server, on the gateway's loop
    prompts    chats and prompts to token ids

It knows no gRPC. What the OpenAI API cannot say (cache salts, priorities, min_p, regular expressions, ...) is taken
under the names that vLLM gave it. Fields that would change the answer and are not supported are refused by name.
"""
