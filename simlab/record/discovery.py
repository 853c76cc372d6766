"""Learning how a model routes from the first, throw-away graph.

llama.cpp's graph is walked node by node in the callback's asking phase, where every tensor's operation,
sources and name can be read without computing anything apart. All nodes are asked for before the first is
computed, so the expert tensors are pointed at empty memory on the way: not even this graph reads the
experts through llama.cpp's mapping of the file. A routing the engine cannot read is refused
by name here, never run wrong.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from simlab.errors import RunError
from simlab.record.ggml import F32, MAP_NORESERVE, Tensor, op_codes
from simlab.types import Gating, ScoreSpace, WeightRule

_EXPERT_TENSOR = re.compile(r"^blk\.(\d+)\.(ffn_\w*_exps)\.weight$")
_NODE = re.compile(r"^(ffn_moe_\w+)-(\d+)$")
_WEIGHT_CHAIN = (
    "ffn_moe_weights",
    "ffn_moe_weights_softmax",
    "ffn_moe_weights_norm",
    "ffn_moe_weights_scaled",
)
_CLAMP_MIN = 6.103515625e-5  # the F16 minimum llama.cpp clamps a weight sum to


@dataclass(frozen=True)
class Routing:
    """How one model routes. Layer keys are model layer numbers."""

    gating: Gating
    score_space: ScoreSpace
    weight_rule: WeightRule
    separate_gate: bool
    """Weights are gathered from another tensor than the one the graph sorted (a selection bias, a mask)."""
    top_k_nodes: Mapping[str, int]
    weight_nodes: Mapping[str, int]
    """Name of the last node of each layer's weight chain, and its layer."""
    experts: Mapping[int, Mapping[str, int]]
    """Pointers of the expert tensors, by layer and suffix."""

    down_nodes: Mapping[str, int]
    """Name of the node each layer's down projection reads: gate and up are done there."""
    router_inputs: Mapping[str, int]
    """Nodes whose second source is the router's input, by name; empty if they have no such node."""
    gates: Mapping[int, int]
    """Pointers of the router weights, by layer."""

    @cached_property
    def gate_nodes(self) -> Mapping[str, int]:
        """Nodes whose source holds the gate probabilities, where those are a tensor of their own."""
        layers = self.top_k_nodes.values() if self.separate_gate else ()
        return {f"ffn_moe_weights-{layer}": layer for layer in layers}

    def nodes(self, overlap: bool, inputs: bool) -> frozenset[str]:
        """Every node the hook stops at: with `overlap` before the down projections, with `inputs` at the gates."""
        names = [*self.top_k_nodes, *self.gate_nodes, *self.weight_nodes]
        names += [*self.down_nodes] if overlap else []
        names += [*self.router_inputs] if inputs else []
        return frozenset(names)


@dataclass
class _Layer:
    top_k: bool = False
    chain: list[str] = field(default_factory=list)
    gating: Gating = "softmax"
    space: ScoreSpace = "prob"
    separate_gate: bool = False
    scale: float = 1.0
    scores: int = 0


class Discovery:
    """An eval callback that asks for nothing and notes what it is shown."""

    def __init__(self, model_name: str) -> None:
        self._model = model_name
        self._layers: dict[int, _Layer] = {}
        self._experts: dict[int, dict[str, int]] = {}
        self._emptied: dict[int, tuple[int, mmap.mmap]] = {}
        self._down_nodes: dict[str, int] = {}
        self._router_inputs: dict[str, int] = {}
        self._gates: dict[int, int] = {}
        self.error: BaseException | None = None

    def __call__(self, pointer: int, ask: bool, _user: object = None) -> bool:
        if ask and self.error is None:
            try:
                self._look(pointer)
            except BaseException as error:  # an exception must not cross the C frames above
                self.error = error
        return not ask

    def _look(self, pointer: int) -> None:
        tensor, op = Tensor.from_address(pointer), op_codes()
        if tensor.op == op["MUL_MAT_ID"]:
            match = _EXPERT_TENSOR.match(Tensor.from_address(tensor.src[0]).name.decode(errors="replace"))
            if match:
                self._experts.setdefault(int(match[1]), {})[match[2]] = tensor.src[0]
                self._empty(tensor.src[0])
                if "down" in match[2]:
                    name = Tensor.from_address(tensor.src[1]).name.decode(errors="replace")
                    self._down_nodes[name] = int(match[1])
            return
        match = _NODE.match(tensor.name.decode(errors="replace"))
        if not match:
            return
        name, layer = match[1], self._layers.setdefault(int(match[2]), _Layer())
        if name == "ffn_moe_logits" and tensor.op == op["MUL_MAT"]:
            self._router_inputs[f"{name}-{match[2]}"] = int(match[2])
            self._gates[int(match[2])] = tensor.src[0]
        elif name == "ffn_moe_topk":
            layer.top_k = True
            layer.scores = score_tensor(pointer)
            layer.gating, layer.space = self._gating(layer.scores)
        elif name in _WEIGHT_CHAIN:
            layer.chain.append(name)
            if name == "ffn_moe_weights":
                gate = _through(tensor.src[0], {op["RESHAPE"], op["VIEW"]})
                layer.separate_gate = gate != layer.scores
            elif name == "ffn_moe_weights_scaled":
                layer.scale = _float_param(tensor)

    def _empty(self, pointer: int) -> None:
        """Point a tensor at zeros, which cost no memory: reading them maps the kernel's one zero page."""
        if pointer not in self._emptied:
            tensor = Tensor.from_address(pointer)
            region = mmap.mmap(-1, tensor.nb[3], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
            self._emptied[pointer] = (tensor.data, region)
            tensor.data = ctypes.addressof(ctypes.c_char.from_buffer(region))

    def restore(self) -> None:
        """Point the expert tensors back at the model's own memory."""
        for pointer, (data, region) in self._emptied.items():
            Tensor.from_address(pointer).data = data
            region.close()
        self._emptied = {}

    def _gating(self, pointer: int) -> tuple[Gating, ScoreSpace]:
        """What kind of numbers a score tensor holds, judged by the operations that made it."""
        op = op_codes()
        tensor = Tensor.from_address(pointer)
        if tensor.type != F32:
            raise RunError(
                f"{self._model}: the router's scores are not float32; simlab cannot read this routing"
            )
        if tensor.op == op["SOFT_MAX"]:
            return "softmax", "prob"
        if tensor.op == op["RESHAPE"] and Tensor.from_address(tensor.src[0]).op == op["SET_ROWS"]:
            # Group-limited routing: the chosen groups' scores are set into rows of -inf.
            chosen = Tensor.from_address(Tensor.from_address(tensor.src[0]).src[0])
            if chosen.op == op["GET_ROWS"]:
                gating, _ = self._gating(_through(chosen.src[0], {op["RESHAPE"]}))
                return gating, "raw"
        seen = tensor
        # A selection bias is added to the gate's output; below it lies the gate.
        if seen.op == op["ADD"] and Tensor.from_address(seen.src[0]).op in (op["UNARY"], op["SOFT_MAX"]):
            seen = Tensor.from_address(seen.src[0])
            return ("sigmoid" if seen.op == op["UNARY"] else "softmax"), "raw"
        if seen.op == op["UNARY"]:
            return "sigmoid", "raw"
        if seen.op in (op["MUL_MAT"], op["ADD"]):
            return "logits", "raw"
        raise RunError(
            f"{self._model}: the router sorts a tensor ({seen.name.decode(errors='replace')}) made by an operation "
            "simlab does not know; its routing cannot be read"
        )

    def result(self) -> Routing:
        """What was learned, once the throw-away graph has run.

        Raises:
            RunError: no routing node, experts without one, or layers that route differently from each other.
        """
        if self.error is not None:
            raise self.error
        layers = {i: layer for i, layer in self._layers.items() if layer.top_k}
        if not layers or not self._experts:
            raise RunError(
                f"{self._model}: no node named ffn_moe_topk-<layer> in its graph; its routing cannot be read"
            )
        if set(layers) != set(self._experts):
            odd = sorted(set(layers) ^ set(self._experts))
            raise RunError(
                f"{self._model}: layers {odd} have experts without a routing node, or one without the other"
            )
        rules = {self._rule(i, layer) for i, layer in layers.items()}
        if len(rules) != 1:
            raise RunError(
                f"{self._model}: its layers route by different rules; simlab records one rule per model"
            )
        gating, space, separate, rule = rules.pop()
        return Routing(
            gating,
            space,
            rule,
            separate,
            {f"ffn_moe_topk-{i}": i for i in layers},
            {f"{layer.chain[-1]}-{i}": i for i, layer in layers.items()},
            self._experts,
            self._down_nodes,
            self._router_inputs,
            {i: pointer for i, pointer in self._gates.items() if i in layers},
        )

    def _rule(self, index: int, layer: _Layer) -> tuple[Gating, ScoreSpace, bool, WeightRule]:
        if not layer.chain:
            raise RunError(
                f"{self._model}: layer {index} applies no routing weights (no node ffn_moe_weights)"
            )
        normalise = "ffn_moe_weights_norm" in layer.chain
        rule = WeightRule(
            softmax_over_selected="ffn_moe_weights_softmax" in layer.chain,
            normalise=normalise,
            clamp_min=_CLAMP_MIN if normalise else 0.0,
            scale=layer.scale,
        )
        return layer.gating, layer.space, layer.separate_gate, rule


def score_tensor(top_k_pointer: int) -> int:
    """Pointer of the tensor the graph sorted: the first source that is not a view, argsort or top-k."""
    op = op_codes()
    return _through(top_k_pointer, {op["VIEW"], op["ARGSORT"], op["TOP_K"]})


def _through(pointer: int, operations: set[int]) -> int:
    tensor = Tensor.from_address(pointer)
    while tensor.op in operations:
        pointer = tensor.src[0]
        tensor = Tensor.from_address(pointer)
    return pointer


def _float_param(tensor: Tensor) -> float:
    return struct.unpack("f", struct.pack("i", tensor.op_params[0]))[0]
