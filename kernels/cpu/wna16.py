"""Products of a few rows with 4- and 8-bit weights, computed from the codes: at one row a step is bound by reading the weights, so a
quarter of the bytes is (up to) four times the speed.

Layout, made at load: panels of 16 outputs, `uint8 [N / 16, rows of K, 16]`, so that one vector holds one input's codes for 16 outputs.
With 4 bits a byte holds two inputs' codes, the even one low. The product is

    y[m, n] = sum over groups g of scale[g, n] * (sum over k in g of code[k, n] * x[m, k] - zero[g, n] * sum over k in g of x[m, k])

in float32, which serves symmetric and asymmetric weights alike.
"""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba import get_num_threads, njit, prange, types
from numba.extending import intrinsic

from dspark.kernels.cpu.avx2_panels import product_codes
from dspark.kernels.cpu.rows import empty_rows
from dspark.kernels.cpu.simd import I32, I64, LANES, VECTOR, broadcast, element_pointer, multiply_add, store, widen
from dspark.kernels.cpu.views import as_array
from dspark.kernels.packing import unpack_codes
from dspark.kernels.wna16 import Wna16Weight

ROW_TILE = 4
I8 = ir.IntType(8)
WIDE = ir.VectorType(I32, LANES)


def _group_intrinsic(num_rows: int, bits: int):
    """sums[r, 0:16] += over num_steps bytes of a panel (one input each with 8 bits, two with 4): code * x[r, k]."""
    per_byte = 8 // bits

    @intrinsic
    def group_sums(typingctx, panel, offset, x, x_offset, x_stride, num_steps, sums):
        signature = types.void(panel, types.int64, x, types.int64, types.int64, types.int64, sums)

        def codegen(context, builder, sig, args):
            panel_v, offset_v, x_v, x_off, x_str, steps, sums_v = args
            base = element_pointer(context, builder, sig.args[0], panel_v, offset_v)
            x_rows = [
                element_pointer(context, builder, sig.args[2], x_v, builder.add(x_off, builder.mul(x_str, I64(r)))) for r in range(num_rows)
            ]
            entry = builder.block
            loop, done = builder.append_basic_block("inputs"), builder.append_basic_block("inputs_done")
            builder.branch(loop)
            builder.position_at_end(loop)
            step = builder.phi(I64)
            step.add_incoming(I64(0), entry)
            zero = ir.Constant(VECTOR, [0.0] * LANES)
            accumulators = [builder.phi(VECTOR) for _ in range(2 * num_rows)]
            for phi in accumulators:
                phi.add_incoming(zero, entry)
            new = list(accumulators)
            for half in range(2):  # two bytes a round: 8 bits have two chains of additions a row, 4 bits four inputs
                byte = builder.add(step, I64(half))
                pointer = builder.gep(base, [builder.mul(byte, I64(LANES))], inbounds=True)
                raw = builder.zext(builder.load(builder.bitcast(pointer, ir.VectorType(I8, LANES).as_pointer()), align=1), WIDE)
                for lane in range(per_byte):
                    code = raw
                    if bits == 4:
                        code = (
                            builder.lshr(raw, ir.Constant(WIDE, [4] * LANES))
                            if lane
                            else builder.and_(raw, ir.Constant(WIDE, [15] * LANES))
                        )
                    value = builder.sitofp(code, VECTOR)
                    index = builder.add(builder.mul(byte, I64(per_byte)), I64(lane))
                    for r in range(num_rows):
                        scalar = broadcast(builder, builder.load(builder.gep(x_rows[r], [index], inbounds=True)))
                        chain = r * 2 + (lane if bits == 4 else half)
                        new[chain] = multiply_add(builder, scalar, value, new[chain])
            following = builder.add(step, I64(2))
            step.add_incoming(following, loop)
            for phi, value in zip(accumulators, new, strict=True):
                phi.add_incoming(value, loop)
            builder.cbranch(builder.icmp_signed("<", following, steps), loop, done)
            builder.position_at_end(done)
            for r in range(num_rows):
                pointer = element_pointer(context, builder, sig.args[6], sums_v, I64(r * LANES))
                builder.store(builder.fadd(new[2 * r], new[2 * r + 1]), builder.bitcast(pointer, VECTOR.as_pointer()), align=4)
            return context.get_dummy_value()

        return signature, codegen

    return group_sums


_w4_1, _w4_2, _w4_3, _w4_4 = (_group_intrinsic(rows, 4) for rows in (1, 2, 3, 4))
_w8_1, _w8_2, _w8_3, _w8_4 = (_group_intrinsic(rows, 8) for rows in (1, 2, 3, 4))


@njit
def _group_sums(bits, num_rows, panel, offset, x, x_offset, x_stride, num_steps, sums):
    if bits == 4:
        if num_rows == 1:
            _w4_1(panel, offset, x, x_offset, x_stride, num_steps, sums)
        elif num_rows == 2:
            _w4_2(panel, offset, x, x_offset, x_stride, num_steps, sums)
        elif num_rows == 3:
            _w4_3(panel, offset, x, x_offset, x_stride, num_steps, sums)
        else:
            _w4_4(panel, offset, x, x_offset, x_stride, num_steps, sums)
    elif num_rows == 1:
        _w8_1(panel, offset, x, x_offset, x_stride, num_steps, sums)
    elif num_rows == 2:
        _w8_2(panel, offset, x, x_offset, x_stride, num_steps, sums)
    elif num_rows == 3:
        _w8_3(panel, offset, x, x_offset, x_stride, num_steps, sums)
    else:
        _w8_4(panel, offset, x, x_offset, x_stride, num_steps, sums)


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _product(x, panels, scales, zeros, bits, num_workers, out):
    """x [M, K] (stored dtype), panels uint8 [N / 16, bytes of K, 16], scales and zeros float32 [G, N] -> out [M, N]."""
    num_rows, num_inputs = x.shape
    num_panels, num_bytes, lanes = panels.shape
    num_groups = scales.shape[0]
    group_inputs, group_bytes = num_inputs // num_groups, num_bytes // num_groups
    wide = np.empty((num_rows, num_inputs), np.float32)
    input_sums = np.empty((num_rows, num_groups), np.float32)
    for row in range(num_rows):
        for g in range(num_groups):
            total = np.float32(0.0)
            for k in range(g * group_inputs, (g + 1) * group_inputs):
                value = widen(x[row, k])
                wide[row, k] = value
                total += value
            input_sums[row, g] = total
    flat_x, flat_panels = wide.reshape(-1), panels.reshape(-1)
    for worker in prange(num_workers):
        sums = np.empty(ROW_TILE * lanes, np.float32)
        totals = np.empty(ROW_TILE * lanes, np.float32)
        for panel in range(worker * num_panels // num_workers, (worker + 1) * num_panels // num_workers):
            for row0 in range(0, num_rows, ROW_TILE):
                tile = min(ROW_TILE, num_rows - row0)
                totals[:] = np.float32(0.0)
                for g in range(num_groups):
                    offset = (panel * num_bytes + g * group_bytes) * lanes
                    _group_sums(
                        bits, tile, flat_panels, offset, flat_x, row0 * num_inputs + g * group_inputs, num_inputs, group_bytes, sums
                    )
                    scale, zero = scales[g, panel * lanes : panel * lanes + lanes], zeros[g, panel * lanes : panel * lanes + lanes]
                    for r in range(tile):
                        shift = input_sums[row0 + r, g]
                        for lane in range(lanes):
                            totals[r * lanes + lane] += scale[lane] * (sums[r * lanes + lane] - zero[lane] * shift)
                for r in range(tile):
                    target = out[row0 + r, panel * lanes : panel * lanes + lanes]
                    for lane in range(lanes):
                        store(target, lane, totals[r * lanes + lane])


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _expand(panels, scales, zeros, bits, out):
    """The dense weight, transposed, that the codes stand for: out [K, N] (stored dtype)."""
    num_panels, num_bytes = panels.shape[0], panels.shape[1]
    group_bytes = num_bytes // scales.shape[0]
    for panel in prange(num_panels):
        first = panel * LANES
        for byte in range(num_bytes):
            codes = panels[panel, byte]
            scale = scales[byte // group_bytes, first : first + LANES]
            zero = zeros[byte // group_bytes, first : first + LANES]
            if bits == 4:
                even, odd = out[2 * byte, first : first + LANES], out[2 * byte + 1, first : first + LANES]
                for lane in range(LANES):
                    store(even, lane, (np.float32(codes[lane] & np.uint8(15)) - zero[lane]) * scale[lane])
                for lane in range(LANES):
                    store(odd, lane, (np.float32(codes[lane] >> np.uint8(4)) - zero[lane]) * scale[lane])
            else:
                row = out[byte, first : first + LANES]
                for lane in range(LANES):
                    store(row, lane, (np.float32(codes[lane]) - zero[lane]) * scale[lane])


class PanelWeight:
    """A quantized weight [N, K] in panels. Raises ValueError when `refuses` gives a reason."""

    def __init__(self, weight: Wna16Weight) -> None:
        reason = self.refuses(weight)
        if reason:
            raise ValueError(reason)
        self.bits = weight.bits
        self.in_features, self.out_features = weight.in_features, weight.out_features
        codes = unpack_codes(weight.qweight, weight.bits, weight.in_features).numpy()  # [K, N]
        if weight.bits == 4:
            codes = codes[0::2] | (codes[1::2] << 4)
        self.panels = np.ascontiguousarray(codes.reshape(codes.shape[0], -1, LANES).transpose(1, 0, 2))
        self.scales = weight.scales.float().numpy()
        default_zero = np.full_like(self.scales, 2.0 ** (weight.bits - 1))
        self.zeros = weight.zeros.float().numpy() if weight.zeros is not None else default_zero

    @staticmethod
    def refuses(weight: Wna16Weight) -> str | None:
        """Why this layout cannot hold a weight, or None."""
        if weight.bits not in (4, 8):
            return f"needs 4 or 8 bits, the weight has {weight.bits}"
        if weight.out_features % LANES:
            return f"needs outputs that {LANES} divides, there are {weight.out_features}"
        if weight.group_size % 4:
            return f"needs a group size that 4 divides, it is {weight.group_size}"
        return None

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] -> [M, N]."""
        out = torch.empty((x.shape[0], self.out_features), dtype=x.dtype)
        _product(as_array(x), self.panels, self.scales, self.zeros, self.bits, get_num_threads(), as_array(out))
        return out

    def widened_product(self, x: torch.Tensor) -> torch.Tensor:
        """The same of bfloat16 rows on CPUs with AVX2, for many rows: weights are rounded to bfloat16 once, as in `transposed`."""
        x, out = x.contiguous(), empty_rows(x.shape[0], self.out_features, x.dtype)
        if x.shape[0]:
            where = x.data_ptr(), x.shape[0], self.in_features, out.data_ptr(), self.out_features, get_num_threads()
            product_codes(*where, self.bits, self.panels, self.scales, self.zeros)
        return out

    def transposed(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight that the codes stand for, as [K, N]; equal to Wna16Weight.dense transposed."""
        out = torch.empty((self.in_features, self.out_features), dtype=dtype)
        _expand(self.panels, self.scales, self.zeros, self.bits, as_array(out))
        return out
