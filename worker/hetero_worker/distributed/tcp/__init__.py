"""The native exchange over TCP: ranks that share no memory.

connecting   how ranks connect, and how they know one another
exchange     rounds and links over the connections
"""
