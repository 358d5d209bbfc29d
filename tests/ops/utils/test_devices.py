import pytest

from ejkernel.ops.utils import devices


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H200", "H200"),
        ("gpu-nvidia_h200-sm90-132c-128g", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB HBM3"),
        ("NVIDIA H100 PCIe", "H100"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("gpu-nvidia_a100-sxm4-80gb-sm80-108c-64g", "A100 SXM4 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40", "L40"),
        ("TPU v4", "TPU v4"),
        ("TPU v5 lite", "TPU v5 lite"),
        ("TPU v5", "TPU v5"),
        ("TPU v6 lite", "TPU v6 lite"),
        ("TPU7x", "TPU7x"),
    ],
)
def test_devices_are_found_by_kind_and_by_fingerprint(name, known):
    assert devices.find(name) == devices.DEVICES[known]


def test_nothing_is_known_of_other_devices():
    assert devices.find("cpu-x86_64-avx512f-2c") == devices.Device()
    assert devices.find("NVIDIA L400") == devices.Device()
