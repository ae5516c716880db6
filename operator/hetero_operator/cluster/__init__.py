"""Every call of the Kubernetes API.

    kinds ◄ fence ◄ transport ◄ store ◄ reflector ◄ cache          watched objects
                              ◄ resources, inquiries                  objects that are listed or read now and then
                              ◄ executor, reporting                   writes, through the fence

Reads fill stores, which the reconciler reads, and go on whether this process leads or not. Writes need the Lease.
"""
