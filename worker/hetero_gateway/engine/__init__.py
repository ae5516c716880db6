"""The engine: what decides which tokens are computed next, and turns tokens into text.

Layer at the bottom of the gateway; it knows neither ranks nor gRPC services. `core` alone knows asyncio.

    config       bounds                     tokenizer, chat_template   text and chat to tokens
    request      one request's state        detokenizer, stop_strings  tokens to text
    block_pool   KV blocks                  stream                     what a request's reader sees
    scheduler    requests to StepPlans      core                       the loop that joins them
"""
