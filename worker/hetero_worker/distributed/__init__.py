"""Everything that ranks exchange: rounds, links, and the groups that carry them.

    exchange         interfaces, and the exchange of one rank     coordinator      makes an epoch's groups, times them
    routes           subgroups and links that a plan needs        rendezvous       how ranks meet and agree
    shm_exchange     rounds through shared memory                 groups           host exchanges and device groups
    shm_links        links through shared memory                  device_group     collectives among GPU ranks
    shm_rank         waits, aborts and lost peers                 hierarchical     groups of GPU ranks and CPU ranks
    shm_segment      layout of the shared memory                  staging          copies and links of a device
    native_exchange  the library in C, and its loader             gloo_exchange    any network; the reference

Models, samplers and runners need only `exchange` and `routes`.
"""
