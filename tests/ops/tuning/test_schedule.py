"""Reading the bundles of a TPU's compiler, from dumps that are cut down to what is read of them."""

import pytest

from ejkernel.ops.tuning import schedule

HLO = """HloModule jit_f, is_scheduled=true
ENTRY %main {
  %copy.9 = bf16[4,128]{1,0} copy(%p), metadata={op_name="jit(f)/transpose"}
  %attend.1 = bf16[4,128]{1,0} custom-call(%copy.9, /*index=1*/%k), custom_call_target="tpu_custom_call"
  ROOT %other = f32[] custom-call(%x), custom_call_target="AllocateBuffer"
}
"""
HEAD = """= control target key start
LH: loop header
LB: loop body
= control target key end

     0   :  { %s1 = inlined_call_operand.hbm [shape: bf16[4,128], index: 0, kind: input, shape index: {}]
hlo: attend.1
 */ }
   0x1   :  { %s2 = smov 0 /* copy for cssa */ } /* Start region 107 :: End region 107 */
"""
LOOP = """   0x2 LB: > { %s19 = sphi %s2, %s35 /* phi copy */ } /* Start region 3 :: Start region 4 */
   0x3   : > { %441 = sbr.rel (%p4) target = $region36  ;;  %s6 = sld [smem:[#allocation31_spill]] }
   0x4   :  {}
   0x5   : > { %627 = sbr.rel (%p10) target = $region48 }
   0x6   : > { %754 = vst [vmem:[#allocation3 + $0x58] sm:$0xff] /*vst_source=*/%v1 } /* End region 47 */
   0x7 PF: > { %853 = sbr.rel (%p12) target = $region52 } /* Start/End empty region 48 :: Start region 49 */
   0x8   : > { %v2 = vld [vmem:[%s4 + $0x78] sm:$0xff]
strides: (1, 1, 64, 1)
second_minor_factor: 1 */ } /* End region 35 */
   0x9   : > { %v3 = vmul.f32 %v2, %v2 }
   0xa   : > { %v4 = vpow2.f32 %v3 }
   0xb PF: > { %p3 = scmp.ne.s32.totalorder %s9, 7 } /* Start/End empty region 52 */
   0xc PF: > { %s35 = sadd.s32 1, %s19 } /* Start/End empty region 36 */
   0xd   : > { %p7 = scmp.ge.s32.totalorder %s35, 4098 /* loop exit test */ }
   0xe   : > { %9 = sbr.rel (!%p7) target = $region4 }
   0xf   :  {}
"""
TAIL = "  0x10   :  { %6606 = vsyncpa [#allocation9], 1 }\n"


def dump(folder, bundles=HEAD + LOOP + TAIL):
    (folder / "100-TLP-hlo.txt").write_text(HLO)
    (folder / "100-TLP-03-final_bundles.txt").write_text(TAIL)
    (folder / "200-copy.9-03-final_bundles.txt").write_text(HEAD + TAIL)
    (folder / "300-attend.1-02-schedule-analysis_final_bundles.txt").write_text("total scheduled bundles: 17")
    (folder / "300-attend.1-03-final_bundles.txt").write_text(bundles)


def test_only_mosaic_kernels_are_read_and_their_loops_counted(tmp_path):
    dump(tmp_path)
    (found,) = schedule.read(tmp_path)
    assert (found.name, found.total, found.loop, found.iterations) == ("attend.1", 17, 13, 4098)
    # What is skipped by the branch at 0x5, and by the one at 0x7; the one at 0x3 is around both.
    assert found.bodies == (1, 3)
    assert (found.step_bundles, found.overhead) == (3, 9)


def test_kernel_without_conditions_counts_its_whole_loop():
    lines = [line for line in LOOP.splitlines() if not any(f"$region{n}" in line for n in (36, 48, 52))]
    found = schedule.parse("plain", HEAD + "\n".join(lines) + "\n" + TAIL)
    assert (found.loop, found.bodies, found.step_bundles) == (10, (), 10)


def test_kernel_without_a_loop_counts_once():
    found = schedule.parse("once", HEAD + TAIL)
    assert (found.total, found.loop, found.iterations, found.step_bundles, found.overhead) == (3, 0, 0, 3, 0)


def test_parts_of_nearly_the_same_size_are_all_steps():
    make = lambda *bodies: schedule.KernelSchedule(name="k", total=99, loop=90, iterations=0, bodies=bodies)
    assert make(5, 30, 36, 20).steps == (30, 36)
    assert make().steps == (90,)


def test_folder_without_a_dump_is_an_error_that_tells_how_to_make_one(tmp_path):
    with pytest.raises(schedule.ScheduleError, match="--xla_jf_dump_to="):
        schedule.read(tmp_path)


@pytest.mark.parametrize("bundles", ["", HEAD + LOOP.replace("/* Start/End empty region 52 */", "") + TAIL])
def test_bundles_of_another_form_are_an_error(tmp_path, bundles):
    dump(tmp_path, bundles)
    with pytest.raises(schedule.ScheduleError, match=r"attend\.1 are not written as expected"):
        schedule.read(tmp_path)
