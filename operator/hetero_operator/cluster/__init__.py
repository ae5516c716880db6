"""All that talks to the Kubernetes API, and nothing else does.

    kinds ◄ transport ◄ discovery, store ◄ reflector ◄ cache         what is watched
                      ◄ resources, group_secrets, nodes, waiting     what is listed or asked for now and then
                      ◄ executor, status_writer, recorder            what is written, through the fence

Reads fill stores, in which the reconciler looks, and go on whether this process leads or not. Writes need the Lease.
"""
