"""The placement formulas in closed form: weights, bandwidths and nothing else.

For one stream that decodes, with W bytes of weights in L layers, bandwidths Bg and Bc of the GPU and the CPU side, the
GPU's share a of the weights, s host exchanges a layer of t_x seconds each:

    GPU only    W / Bg
    CPU only    W / Bc
    tensor      max(a·W/Bg, (1 - a)·W/Bc) + s·L·t_x
    layer       a·W/Bg + (1 - a)·W/Bc + 2·hop
    streaming   max(W/Bg, (1 - a)·W/Bus)

They are what the cost model comes to where everything divides as it likes: a check of it, and the quickest way to see
what a machine would be good for.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """A model on a GPU side and a CPU side. Bytes, bytes a second, seconds; results are seconds a token."""

    weight_bytes: float
    num_layers: int
    gpu_bandwidth: float
    cpu_bandwidth: float
    gpu_capacity: float | None = None
    """Bytes of weights that the GPU side can hold; None: all."""
    bus_bandwidth: float | None = None
    """From host memory to the GPUs."""

    @property
    def most_on_gpu(self) -> float:
        """Largest share of the weights that the GPU side can hold."""
        return 1.0 if self.gpu_capacity is None else min(1.0, self.gpu_capacity / self.weight_bytes)

    @property
    def balanced_share(self) -> float:
        """The GPU's share at which both sides take as long, if it can hold it."""
        return min(self.gpu_bandwidth / (self.gpu_bandwidth + self.cpu_bandwidth), self.most_on_gpu)

    def gpu_only_s(self) -> float | None:
        """None where the weights do not fit."""
        return self.weight_bytes / self.gpu_bandwidth if self.most_on_gpu == 1 else None

    def cpu_only_s(self) -> float:
        return self.weight_bytes / self.cpu_bandwidth

    def tensor_s(self, *, exchanges: int, exchange_s: float, share: float | None = None) -> float:
        """With so many host exchanges a layer; at the best share unless one is given."""
        a = self.balanced_share if share is None else share
        slower = max(a * self.weight_bytes / self.gpu_bandwidth, (1 - a) * self.weight_bytes / self.cpu_bandwidth)
        return slower + exchanges * self.num_layers * exchange_s

    def layer_s(self, *, hop_s: float = 0.0, share: float | None = None) -> float:
        """As much on the GPU as fits, unless a share is given."""
        a = self.most_on_gpu if share is None else share
        hops = 2 * hop_s if a < 1 else 0.0
        return a * self.weight_bytes / self.gpu_bandwidth + (1 - a) * self.weight_bytes / self.cpu_bandwidth + hops

    def streaming_s(self) -> float | None:
        """What does not fit comes over the bus, every token; None where all fits or the bus is not known."""
        if self.bus_bandwidth is None or self.most_on_gpu == 1:
            return None
        streamed = (1 - self.most_on_gpu) * self.weight_bytes
        return max(self.weight_bytes / self.gpu_bandwidth, streamed / self.bus_bandwidth)

    def break_even_exchange_s(self, *, exchanges: int) -> float:
        """Where all fits the GPU: tensor is faster than GPU only if an exchange takes less."""
        both = self.gpu_bandwidth + self.cpu_bandwidth
        return self.weight_bytes * self.cpu_bandwidth / (exchanges * self.num_layers * self.gpu_bandwidth * both)
