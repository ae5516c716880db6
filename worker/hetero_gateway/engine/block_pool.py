"""BlockPool: the paged KV cache's bookkeeping, i.e. who uses each block and which tokens' KV it holds.

A block holds the KV of `block_size` token positions on every rank that has KV heads; slot mapping is
block_id * block_size + offset. The pool knows ids, reference counts and digests, never tensors. What always holds:

- Block 0 is the null block: it is never handed out, so padding can point at it.
- free + used = all. Used means that at least one request refers to it.
- A registered block's content is the KV of exactly the tokens in its digest, computed. Blocks are registered
  once the step that filled them is done, so no lookup finds a block that is still being computed.
- Ranks work plans off in order. So a block may be freed, and handed out to a later plan, while a step that reads or
  writes it is in flight: everything that step does to it comes before anything the later plan does.
- A free block keeps its digest until it is handed out again: that is the prefix cache. Free blocks are handed out
  least recently used first, those without a digest before all others.

Digests are chained SHA-256: a block's covers its parent's, hence all tokens before it, and the chain starts at
the tenant's salt. Two prefixes with one digest would be a collision of SHA-256, so tokens are not compared on
a hit, and no client can craft a prompt that finds another tenant's blocks.

Every operation is O(1) a block. One thread.

StateSnapshots is the same for states of sequences, in models that keep any. CacheLog tells others which prefixes the
pool holds.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from hetero_gateway.engine.errors import EngineFault

NULL_BLOCK: Final = 0
MAX_LOGGED_EVENTS: Final = 65_536
_KEY_BYTES: Final = 8


class BlockDigests:
    """Chain of digests of one sequence's full blocks, computed on demand."""

    def __init__(self, *, cache_salt: str, block_size: int) -> None:
        self._block_size = block_size
        self._root = hashlib.sha256(b"hetero-kv-root\0" + cache_salt.encode()).digest()
        self._chain: list[bytes] = []

    def upto(self, num_blocks: int, token_ids: Sequence[int]) -> list[bytes]:
        """Return digests of the first `num_blocks` blocks of `token_ids`, whose known tokens must never change."""
        if num_blocks > len(self._chain):
            self._extend(num_blocks, token_ids)
        return self._chain[:num_blocks]

    def of_block(self, index: int, token_ids: Sequence[int]) -> bytes:
        """Return the digest of one block."""
        if index >= len(self._chain):
            self._extend(index + 1, token_ids)
        return self._chain[index]

    def _extend(self, num_blocks: int, token_ids: Sequence[int]) -> None:
        size, chain = self._block_size, self._chain
        for index in range(len(chain), num_blocks):
            tokens = array("I", token_ids[index * size : (index + 1) * size])
            chain.append(hashlib.sha256((chain[-1] if chain else self._root) + tokens.tobytes()).digest())


class StoredBlock(NamedTuple):
    """A block that a prefix lookup finds from now on. `parent` is the key of the block before it; None: it is first."""

    key: int
    parent: int | None
    token_ids: array[int]


class RemovedBlock(NamedTuple):
    """A block that no lookup finds any more."""

    key: int


class ClearedCache(NamedTuple):
    """The end of all blocks that were stored before."""


CacheEvent = StoredBlock | RemovedBlock | ClearedCache


class CacheBatch(NamedTuple):
    """Events that came together, with their number in the order of batches, from 1 on."""

    number: int
    events: list[CacheEvent]


class CacheLog:
    """Record of what the prefix cache holds, and of its last changes in order, for a router that sends prompts there.

    It is off until `begin`, and costs nothing then. It knows blocks without a salt only: a salt keeps a tenant's
    prompts from others. A block's key is the first 8 bytes of its digest, as a signed number.
    """

    def __init__(self, *, max_events: int = MAX_LOGGED_EVENTS) -> None:
        self.is_on = False
        self.last_number = 0
        """Number of the last batch."""
        self.stored_blocks: dict[int, StoredBlock] = {}
        """Blocks that lookups find, by key, each behind its parent."""
        self._max_events = max_events
        self._num_events = 0
        self._batches: deque[CacheBatch] = deque()
        self._news: list[CacheEvent] = []
        self._on_news: Callable[[], object] = lambda: None

    def begin(self, on_news: Callable[[], object]) -> None:
        """Record from now on, while the cache is empty; `on_news` is called when there is something to seal."""
        self.is_on, self._on_news = True, on_news
        self.cleared()
        self.seal()

    def stored(self, digest: bytes, parent: bytes | None, token_ids: Sequence[int]) -> None:
        """Note that lookups find a block."""
        key = _key(digest)
        block = StoredBlock(key, None if parent is None else _key(parent), array("I", token_ids))
        self.stored_blocks[key] = block
        self._note(block)

    def removed(self, digest: bytes) -> None:
        """Note that lookups no longer find a block, if it was noted that they do."""
        if self.is_on and self.stored_blocks.pop(_key(digest), None) is not None:
            self._note(RemovedBlock(_key(digest)))

    def cleared(self) -> None:
        """Note that the cache is empty."""
        if self.is_on:
            self.stored_blocks.clear()
            self._note(ClearedCache())

    def seal(self) -> None:
        """Make a batch of the events that have come since the last; do nothing without any."""
        if not self._news:
            return
        self.last_number += 1
        self._batches.append(CacheBatch(self.last_number, self._news))
        self._num_events += len(self._news)
        self._news = []
        while self._num_events > self._max_events:
            self._num_events -= len(self._batches.popleft().events)

    def since(self, number: int) -> list[CacheBatch] | None:
        """Return the batches from `number` on; None if one of them is gone, or if there has not been one before it."""
        first = self.last_number + 1 - len(self._batches)
        if not first <= number <= self.last_number + 1:
            return None
        return [batch for batch in self._batches if batch.number >= number]

    def _note(self, event: CacheEvent) -> None:
        self._news.append(event)
        if len(self._news) == 1:
            self._on_news()


def _key(digest: bytes) -> int:
    return int.from_bytes(digest[:_KEY_BYTES], "little", signed=True)


class BlockPool:
    """Pool of the blocks 0 .. num_blocks - 1, the null block included in `num_blocks`."""

    def __init__(self, *, num_blocks: int, log: CacheLog | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1 (the null block), not {num_blocks}")
        self.log = log or CacheLog()
        """Told of blocks that are forgotten; whoever registers blocks tells it of them."""
        self._num_refs = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._by_digest: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._num_cached = 0

    @property
    def capacity(self) -> int:
        """Blocks that can be handed out: all but the null block."""
        return len(self._num_refs) - 1

    @property
    def free_blocks(self) -> int:
        """Blocks that no request refers to, whether or not they cache something."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks that requests refer to."""
        return self.capacity - len(self._free)

    @property
    def cached_blocks(self) -> int:
        """Free blocks that still have a digest."""
        return self._num_cached

    def lookup(self, digests: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest registered prefix of `digests`. Takes no reference."""
        block_ids: list[int] = []
        for digest in digests:
            block_id = self._by_digest.get(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def can_allocate(self, count: int, *, keeping: Sequence[int] = ()) -> bool:
        """Return whether `count` blocks can be handed out after the blocks `keeping` were acquired."""
        kept = sum(self._num_refs[block_id] == 0 for block_id in keeping)
        return count <= len(self._free) - kept

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each of these, which a lookup has just found or another request uses.

        Raises EngineFault if one of them holds nothing that could be shared.
        """
        for block_id in block_ids:
            if self._num_refs[block_id] == 0:
                if self._digests[block_id] is None:
                    raise EngineFault(f"block {block_id} holds nothing that could be shared")
                del self._free[block_id]
                self._num_cached -= 1
            self._num_refs[block_id] += 1

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each; their cached content is forgotten.

        Ask `can_allocate` first: raises EngineFault if too few are free.
        """
        if count > len(self._free):
            raise EngineFault(f"{count} blocks asked for, {len(self._free)} of {self.capacity} are free")
        return [self._take_oldest() for _ in range(count)]

    def register(self, block_id: int, digest: bytes) -> bool:
        """Note that a used block now holds the computed KV of `digest`'s tokens; return whether lookups find it.

        When another block holds the same already (two requests computed it side by side) this one stays
        unregistered: its request goes on using it, and it is free of content when released.
        """
        if self._num_refs[block_id] == 0 or self._digests[block_id] is not None:
            raise EngineFault(f"block {block_id} cannot be registered: it is free or registered already")
        if digest in self._by_digest:
            return False
        self._by_digest[digest] = block_id
        self._digests[block_id] = digest
        return True

    def forget(self) -> None:
        """Have lookups find nothing; requests keep their blocks."""
        for block_id in self._by_digest.values():
            self._digests[block_id] = None
        self._by_digest.clear()
        self._num_cached = 0
        self.log.cleared()

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop a reference to each, in reverse: so a prefix's tail is evicted before its head. Raises EngineFault."""
        for block_id in reversed(block_ids):
            if self._num_refs[block_id] == 0:
                raise EngineFault(f"block {block_id} is released more often than it was taken")
            self._num_refs[block_id] -= 1
            if self._num_refs[block_id] == 0:
                self._put_back(block_id)

    def check_integrity(self) -> None:
        """Compare every count with the blocks themselves, O(blocks). Raises EngineFault."""
        used = sum(refs > 0 for refs in self._num_refs)
        cached = sum(self._digests[block_id] is not None for block_id in self._free)
        found = {block_id: digest for digest, block_id in self._by_digest.items()}
        claimed = {b: digest for b, digest in enumerate(self._digests) if digest is not None}
        problems = [
            problem
            for broken, problem in (
                (len(self._free) + used != self.capacity, "free + used is not all"),
                (cached != self._num_cached, f"{cached} free blocks are cached, {self._num_cached} were counted"),
                (any(self._num_refs[b] != 0 for b in self._free), "a free block is referred to"),
                (NULL_BLOCK in self._free or self._num_refs[NULL_BLOCK] != 0, "the null block was handed out"),
                (found != claimed or NULL_BLOCK in found, "digests and blocks disagree"),
            )
            if broken
        ]
        if problems:
            raise EngineFault("block pool: " + "; ".join(problems))

    def _take_oldest(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        digest = self._digests[block_id]
        if digest is not None:
            del self._by_digest[digest]
            self._digests[block_id] = None
            self._num_cached -= 1
            self.log.removed(digest)
        self._num_refs[block_id] = 1
        return block_id

    def _put_back(self, block_id: int) -> None:
        self._free[block_id] = None
        if self._digests[block_id] is None:
            # Nothing is lost with it, so it goes before every block that caches something.
            self._free.move_to_end(block_id, last=False)
        else:
            self._num_cached += 1


class StateSnapshots:
    """Snapshots 0 .. count - 1 of sequences' states, for a cache of `num_blocks` blocks.

    Some models keep states of each sequence in place of keys and values of tokens. Behind cached blocks of such a model
    a sequence can begin only where a snapshot of the states was taken. What always holds:

    - A snapshot that can be found is that behind exactly the tokens of its digest, and the step that took it is done.
    - A snapshot that the plan in the making reads is not taken again in the same plan, whose sequences are computed in
      any order. A later plan may take it, because ranks work plans off in order.
    - The least recently used is replaced first.

    Snapshots of a prompt are taken every `spacing` blocks, so that all of them reach as far as the KV cache does, and
    behind its last full block, which completions of one prompt share.
    """

    def __init__(self, *, count: int, num_blocks: int) -> None:
        self.spacing = -(-num_blocks // count) if count else 0
        """Blocks between two snapshots of a prompt."""
        self._free = list(range(count))
        self._by_digest: OrderedDict[bytes, int] = OrderedDict()
        self._pending: dict[bytes, int] = {}
        self._read: set[int] = set()

    def begin_plan(self) -> None:
        """Forget what the last plan read."""
        self._read.clear()

    def longest(self, digests: Sequence[bytes]) -> int:
        """Return the largest number of leading blocks, by their digests, behind which there is a snapshot; 0: none."""
        return next((end for end in range(len(digests), 0, -1) if digests[end - 1] in self._by_digest), 0)

    def read(self, digest: bytes) -> int:
        """Return the snapshot behind a block, which the plan in the making reads. Raises EngineFault if it is gone."""
        snapshot = self._by_digest.get(digest)
        if snapshot is None:
            raise EngineFault("a sequence begins behind blocks without a snapshot")
        self._by_digest.move_to_end(digest)
        self._read.add(snapshot)
        return snapshot

    def take(self, digest: bytes) -> int | None:
        """Return a snapshot to take behind a block; None if there is one, or no room for it."""
        if digest in self._by_digest:
            self._by_digest.move_to_end(digest)
            return None
        if digest in self._pending:
            return None
        snapshot = self._free.pop() if self._free else self._replaced()
        if snapshot is not None:
            self._pending[digest] = snapshot
        return snapshot

    def taken(self, digests: Sequence[bytes]) -> None:
        """Take note that a step which took these snapshots is done."""
        for digest in digests:
            self._by_digest[digest] = self._pending.pop(digest)

    def forget(self) -> None:
        """Have no sequence begin behind a snapshot that was taken until now."""
        self._free.extend(snapshot for snapshot in self._by_digest.values())
        self._by_digest.clear()

    def places(self, begin: int, end: int, *, last: int) -> Iterator[int]:
        """Yield the numbers of leading blocks in (begin, end] behind which a prompt's snapshots are taken, ascending.

        `last` is one of them in any case, if it is in the range.
        """
        if not self.spacing:
            return
        first = (begin // self.spacing + 1) * self.spacing
        yield from sorted({*range(first, end + 1, self.spacing), *([last] if begin < last <= end else [])})

    def _replaced(self) -> int | None:
        digest = next((digest for digest, snapshot in self._by_digest.items() if snapshot not in self._read), None)
        return None if digest is None else self._by_digest.pop(digest)
