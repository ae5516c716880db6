"""The engine: decides which tokens are computed next, and turns tokens into text.

The gateway's lowest layer; it knows neither ranks nor gRPC services. Scheduling knows no asyncio.

    core                the loop that joins all of it       text    tokenizer, chat template, detokenizer, constraints
      admission         who may come in, who has to wait    config  bounds, also of a request
      output_processor  from tokens to streams              errors  ends and refusals
      stream            events that a reader sees
      step_pace         how fast the ranks step
    scheduler           requests to plans, results to tokens
      step_planner      what a step computes
      waiting           completions that do not run
      running_batch     completions with slot and blocks
      block_pool        KV blocks and the prefix cache
    request, step       what crosses these borders
    steps_in_flight     the steps that are out
"""
