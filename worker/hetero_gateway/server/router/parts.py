"""Everything that the router's door answers from, without the package of its messages."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_gateway.engine.core import EngineCore
from hetero_gateway.server.access.intake import Intake
from hetero_gateway.server.calls import InFlight
from hetero_gateway.server.config import ServedModel
from hetero_gateway.server.metrics import GatewayMetrics
from hetero_gateway.server.reading import RequestReader


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterParts:
    """Everything that the service answers from."""

    core: EngineCore
    intake: Intake
    reader: RequestReader
    model: ServedModel
    metrics: GatewayMetrics
    in_flight: InFlight
