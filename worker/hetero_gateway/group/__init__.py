"""The group of ranks: who owns what, how the ranks become a group, and what ends it.

Layer between the gRPC servers and the engine; it knows asyncio and protobuf, not gRPC. A rank is a RankLink here, no
matter what carries its messages.

    rendezvous  epochs, one after another             settings    the group as the resource wants it
      roster    which rank holds which place          placement   who owns what, and how well it does
      recovery  silent ranks; when to begin again     cache_size  KV blocks from budgets
    epoch       one epoch, from FormGroup to its end  experts     which experts move, and when
      orders    what ranks form and load              admin_rpcs  reset, sleep, wake, drain, profile
      warm_up   the first plans                       status      Admin.GetTopology's answer
      executor  StepPlans and commands over the links
"""
