"""ExpertRebalancer: when experts are moved without being asked for.

Only after the group has been idle for a while and so many tokens were computed since the last time that their counts
say something; and not often, for files are read. It asks GroupVerbs as an administrator would, and is refused like one
when the group does something else. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from hetero_gateway.engine.core import EngineCore
from hetero_gateway.engine.errors import GroupLost
from hetero_gateway.group.errors import WrongState
from hetero_gateway.group.settings import GroupSettings
from hetero_gateway.group.verbs import GroupVerbs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RebalancePolicy:
    """When to look whether experts should move."""

    idle_s: float = 10.0
    """Without a request for so long."""
    min_tokens: int = 10_000
    """Prompt and output tokens computed since the last time."""
    interval_s: float = 300.0
    """From one time to the next, at least."""


def is_wanted(settings: GroupSettings) -> bool:
    """Whether the model has experts, and the resource wants them to be moved unasked.

    In batch-invariant mode it does not: sums of experts would be added up in another order.
    """
    spec = settings.spec
    return settings.config.experts is not None and spec.placement.rebalance_experts and not spec.engine.batch_invariant


class ExpertRebalancer:
    """See the module."""

    def __init__(
        self,
        verbs: GroupVerbs,
        *,
        core: EngineCore,
        policy: RebalancePolicy = RebalancePolicy(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._verbs = verbs
        self._core = core
        self._policy = policy
        self._clock = clock
        self._last_tokens = 0
        self._last_s = -policy.interval_s

    async def run(self) -> NoReturn:
        """Until cancelled."""
        while True:
            await self._core.wait_idle()
            before = self._computed_tokens
            await asyncio.sleep(self._policy.idle_s)
            if self._core.is_idle and self._computed_tokens == before and self._is_due:
                await self._rebalance()

    @property
    def _computed_tokens(self) -> int:
        stats = self._core.stats()
        return stats.prompt_tokens + stats.generated_tokens

    @property
    def _is_due(self) -> bool:
        is_counted = self._computed_tokens - self._last_tokens >= self._policy.min_tokens
        return is_counted and self._clock() - self._last_s >= self._policy.interval_s

    async def _rebalance(self) -> None:
        self._last_tokens, self._last_s = self._computed_tokens, self._clock()
        try:
            await self._verbs.place_experts()
        except (WrongState, GroupLost) as error:
            logger.info("experts stay where they are for now: %s", error)
