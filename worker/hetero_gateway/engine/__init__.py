"""The engine: what decides which tokens are computed next, and turns tokens into text.

Layer at the bottom of the gateway; it knows neither ranks nor gRPC services. What is scheduled knows no asyncio.

    scheduler      requests to StepPlans, results to tokens      core             the loop that joins all of it
      planner        what a step computes                          deliveries       from tokens to streams
      waiting        who does not run, in what order               steps_in_flight  what is out on the group
      residents      who has slot and blocks                       stream           what a request's reader sees
      decode_batch   who computes one token a step               tokenizer        text to tokens and back
      block_pool     KV blocks and the prefix cache                chat_template    chat to text
      results        a result, in bulk                             detokenizer      tokens to text, as they come
    request, step  what crosses these borders                      stop_strings     what ends a text
    config, limits bounds                                        constraints      forms that text is bound to
                                                                 pace             whose turn it is to be read
                                                                 pauses, intake   waiting for a group; who is let in
                                                                 holds, alarm     no steps for a while; deadlines
"""
