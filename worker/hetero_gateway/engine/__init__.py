"""The engine: decides which tokens are computed next, and turns tokens into text.

The gateway's lowest layer; it knows neither ranks nor gRPC services. Scheduling knows no asyncio.

    core                the loop that joins all of it       tokenizer       text to tokens and back
      admission         who may come in, who has to wait    chat_template   chat to text
      output_processor  from tokens to streams              detokenizer     tokens to text, as they come
      stream            events that a reader sees           stop_strings    strings that end a text
      step_pace         how fast the ranks step             constraints     forms that text is bound to
    scheduler           requests to plans, results to tokens
      step_planner      what a step computes                config, limits  bounds
      waiting           completions that do not run         errors          ends and refusals
      running_batch     completions with slot and blocks
      block_pool        KV blocks and the prefix cache
    request, step       what crosses these borders
    steps_in_flight     the steps that are out
"""
