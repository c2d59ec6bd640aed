"""The peak speed of a device in bfloat16 products, of which a training run's speed is a share (MFU)."""

from __future__ import annotations

# Teraflops per second of dense bfloat16 products accumulated in float32, from the makers' data sheets, by the device's
# kind in JAX (`jax.Device.device_kind`). The first name with which a kind begins counts.
_PEAKS = {
    "NVIDIA B200": 2250.0,
    "NVIDIA GB200": 2450.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100": 989.4,
    "NVIDIA H200": 989.4,
    "NVIDIA GH200": 989.4,
    "NVIDIA A100": 312.0,
    "NVIDIA A10G": 70.0,
    "NVIDIA A10": 125.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA L4": 121.0,
    "NVIDIA GeForce RTX 3090": 71.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5090": 209.5,
    "TPU v4": 275.0,
    "TPU v5 lite": 197.0,
    "TPU v5e": 197.0,
    "TPU v5": 459.0,
    "TPU v5p": 459.0,
    "TPU v6": 918.0,
}


def peak_flops(device_kind: str) -> float | None:
    """Return the peak speed of a device in floating point operations per second: dense products of bfloat16,
    accumulated in float32, without sparsity. None for a device that is not in the table, such as a CPU.

    Args:
        device_kind: `jax.Device.device_kind`, such as "NVIDIA H200".
    """
    # A kind is a name and details, divided by a space or a hyphen: "NVIDIA A100-SXM4-80GB".
    details = device_kind.replace("-", " ") + " "
    return next(
        (1e12 * peak for name, peak in _PEAKS.items() if details.startswith(f"{name} ")), None
    )
