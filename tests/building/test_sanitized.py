"""Which of ThreadSanitizer's reports count, see sanitized.py. What the stacks say is from real reports, shortened."""

from __future__ import annotations

import pytest
import sanitized

TSAN, TORCH, OURS = (
    "(libtsan.so.2+0x1)",
    "(libtorch_cpu.so+0x1)",
    "(_C-2_13_0-cf30153c4c13.cpython-311-x86_64-linux-gnu.so+0x1)",
)
DELETE = f"operator delete(void*, unsigned long) tsan_new_delete.cpp:150 {TSAN}"
DESTROY = f"pthread_cond_destroy tsan_interceptors_posix.cpp:1283 {TSAN}"
FREE = f"free tsan_interceptors_posix.cpp:706 {TSAN}"
CLEAR = f"memset sanitizer_common_interceptors.inc:799 {TSAN}"
LOCK = f"pthread_mutex_lock sanitizer_common_interceptors.inc:4324 {TSAN}"
BROADCAST = f"pthread_cond_broadcast tsan_interceptors_posix.cpp:1276 {TSAN}"
WORK, STORAGE, FUTURE = (f"c10::intrusive_ptr<{name}>" for name in ("c10d::Work", "c10::StorageImpl", "c10::Future"))
RUN_LOOP = f"c10d::ProcessGroupGloo::runLoop(int) <null> {TORCH}"
FINISH = f"c10d::ProcessGroupGloo::AsyncWork::finishWorkGloo() <null> {TORCH}"
SENDS = f"ddp_hooks::MessageSender::all_reduce(at::Tensor const&) ../csrc/transport/message_sender.cpp:232 {OURS}"
MERGES = f"merge_gathered ../csrc/agreement/mask_exchange.cpp:39 {OURS}"
STEP_GOES = f"ddp_hooks::StepInFlight::~StepInFlight() ../csrc/transport/step_in_flight.h:55 {OURS}"
DROPS_WORK = f"{WORK}::reset_() torch/include/c10/util/intrusive_ptr.h:402 {OURS}"
COUNTS_OFF = [
    f"std::__atomic_base<unsigned long>::fetch_sub(unsigned long, std::memory_order) atomic_base.h:628 {OURS}",
    f"c10::detail::atomic_combined_refcount_decrement(std::atomic<unsigned long>&) intrusive_ptr.h:102 {OURS}",
]
VECTOR_GOES = f"std::vector<unsigned int, std::allocator<unsigned int> >::~vector() stl_vector.h:730 {OURS}"
TENSORS_GO = "std::vector<std::vector<at::Tensor, std::allocator<at::Tensor> >, std::allocator<void> >::~vector()"
STATE_GOES = "at::ThreadLocalState::~ThreadLocalState()"
GROUP = "c10::intrusive_ptr<torch::CustomClassHolder>"
GIVES_GROUP_UP = f"{GROUP}::reset_not_null_(torch::CustomClassHolder*) intrusive_ptr.h:350 {OURS}"
CLEARS_GROUP = [CLEAR, CLEAR, f"c10d::ProcessGroup::release_resources() <null> {TORCH}", GIVES_GROUP_UP]
STORAGE_GOES = [
    FREE,
    "free ../include/rtld-malloc.h:50 (ld-linux-x86-64.so.2+0x11785)",
    "__GI__dl_deallocate_tls ../elf/dl-tls.c:682 (ld-linux-x86-64.so.2+0x11785)",
]
LETS_GROUP_GO = f"ddp_hooks::GroupReference<c10d::Backend>::let_go() ../csrc/agreement/group_reference.h:56 {OURS}"
SHARED_GOES = (
    f"std::_Sp_counted_ptr_inplace<ddp_hooks::MaskInTransit, std::allocator<void> >::_M_dispose() <null> {OURS}"
)


def race(freeing: list[str], using: list[str], kind: str = "data race") -> str:
    """Return a report in which the stack ``freeing`` stands before the stack ``using``."""
    one, other = ("\n".join(f"    #{i} {frame}" for i, frame in enumerate(stack)) for stack in (freeing, using))
    return (
        f"WARNING: ThreadSanitizer: {kind} (pid=7)\n  Write of size 8 at 0x7b by main thread:\n{one}\n\n"
        f"  Previous atomic read of size 1 at 0x7b by thread T5 (mutexes: write M1):\n{other}\n\n"
        f"  Thread T5 'pt_gloo_runloop' (tid=9, running) created by main thread at:\n    #0 pthread_create x {TSAN}\n"
        f"    #1 {SENDS}\n\nSUMMARY: ThreadSanitizer: {kind} x"
    )


@pytest.mark.parametrize(
    ("freeing", "using"),
    [
        pytest.param([DELETE, DROPS_WORK, SENDS], [BROADCAST, FINISH], id="we drop a work"),
        pytest.param(
            [DESTROY, f"c10d::(anonymous namespace)::AsyncAllgatherWork::~AsyncAllgatherWork() x {TORCH}", SHARED_GOES],
            [BROADCAST, FINISH],
            id="a work goes with what holds it",
        ),
        pytest.param(
            [DELETE, f"{STATE_GOES} x {TORCH}", DROPS_WORK, SENDS],
            [BROADCAST, FINISH],
            id="a part of a work",
        ),
        pytest.param(
            [DELETE, f"{STATE_GOES} x {TORCH}", SHARED_GOES], [BROADCAST, FINISH], id="a part of a work, inlined"
        ),
        pytest.param(
            [DESTROY, f"{FUTURE}::reset_not_null_(c10::Future*) <null> (libtorch_python.so+0x1)"],
            [BROADCAST, FINISH, STEP_GOES],
            id="Python drops a future",
        ),
        pytest.param(
            [DELETE, RUN_LOOP], [f"c10d::Work::wait(long) <null> {TORCH}", MERGES], id="a worker drops a work"
        ),
        pytest.param([DELETE, f"{TENSORS_GO} <null> {TORCH}"], [MERGES], id="a worker drops a work's tensors"),
        pytest.param(
            [FREE, f"{STORAGE}::reset_not_null_(c10::StorageImpl*) <null> (libc10.so+0x1)"],
            [MERGES],
            id="a worker drops a storage",
        ),
        pytest.param(
            [DELETE, "THPVariable_clear(THPVariable*) <null> (libtorch_python.so+0x1)"],
            [*COUNTS_OFF, STEP_GOES],
            id="after our own drop",
        ),
        pytest.param(
            [DELETE, f"ddp_hooks::MessageSender::all_reduce(at::Tensor const&) <null> {OURS}"],
            [LOCK, f"c10d::Work::finish(std::__exception_ptr::exception_ptr) <null> {TORCH}"],
            id="we drop a work, inlined",
        ),
        pytest.param(
            [CLEAR, CLEAR, f"c10d::ProcessGroup::~ProcessGroup() <null> {TORCH}"],
            CLEARS_GROUP,
            id="a registry gives up a group",
        ),
        pytest.param(
            [DELETE, f"std::_Rb_tree<c10::weak_intrusive_ptr<c10d::ProcessGroup> >::_M_erase(void*) <null> {TORCH}"],
            [f"{GROUP}::release_resources_and_decrement_weakrefs_() x {OURS}", GIVES_GROUP_UP],
            id="a registry frees a group",
        ),
        pytest.param(
            [*STORAGE_GOES, f"c10d::ProcessGroupGloo::~ProcessGroupGloo() <null> {TORCH}", SHARED_GOES],
            [CLEAR, CLEAR, f"at::impl::ThreadLocalPythonObjects::~ThreadLocalPythonObjects() <null> {TORCH}"],
            id="the storage of a worker that has ended",
        ),
        pytest.param(
            [*STORAGE_GOES, "std::thread::detach() <null> (libstdc++.so.6+0xd4544)", LETS_GROUP_GO],
            [CLEAR, CLEAR, f"at::impl::ThreadLocalPythonObjects::~ThreadLocalPythonObjects() <null> {TORCH}"],
            id="the storage of another thread that has ended, where we start one",
        ),
    ],
)
def test_last_drop_is_no_race(freeing: list[str], using: list[str]) -> None:
    assert not sanitized.is_ours(race(freeing, using))
    # The same stacks, where it is not the freeing that came last.
    assert sanitized.is_ours(race(using, freeing))
    assert sanitized.is_ours(race(freeing, using, kind="heap-use-after-free"))


@pytest.mark.parametrize(
    ("freeing", "using"),
    [
        pytest.param([DELETE, VECTOR_GOES, STEP_GOES], [MERGES], id="a member of ours"),
        pytest.param([DELETE, SHARED_GOES], [MERGES], id="what we count"),
        pytest.param([DELETE, f"{TENSORS_GO} stl_vector.h:730 {OURS}", STEP_GOES], [MERGES], id="tensors that we hold"),
        pytest.param([DELETE, VECTOR_GOES, STEP_GOES, DROPS_WORK, SENDS], [MERGES], id="ours, held by a work"),
        pytest.param(
            [DELETE, f"c10::intrusive_ptr<ddp_hooks::Thing>::reset_() intrusive_ptr.h:402 {OURS}"],
            [MERGES],
            id="ours, counted by torch's pointer",
        ),
        pytest.param([DELETE, f"{STATE_GOES} x {OURS}", SHARED_GOES], [MERGES], id="a state of ours"),
        pytest.param([DELETE, f"c10d::Reducer::~Reducer() <null> {TORCH}"], [MERGES], id="what torch does not count"),
        pytest.param([DELETE, DROPS_WORK, SENDS], [DELETE, RUN_LOOP], id="freed twice"),
        pytest.param([DROPS_WORK, SENDS], [MERGES], id="a drop that frees nothing"),
        pytest.param([MERGES], [MERGES], id="two writes"),
        pytest.param([DELETE, STEP_GOES], [LOCK, MERGES], id="a mutex of ours"),
        pytest.param([FREE, SENDS, *STORAGE_GOES[1:]], [MERGES], id="ours, freed at the end of a thread"),
        pytest.param([CLEAR, MERGES], [MERGES], id="we clear a table"),
        pytest.param([CLEAR, VECTOR_GOES, DROPS_WORK], [MERGES], id="ours is cleared, held by a work"),
    ],
)
def test_race_about_ours(freeing: list[str], using: list[str]) -> None:
    assert sanitized.is_ours(race(freeing, using))


def test_race_about_others() -> None:
    assert not sanitized.is_ours(race([DELETE, RUN_LOOP], [BROADCAST, FINISH]))
    abort = "ERROR: AddressSanitizer: ABRT on unknown address 0xb0\n    #0 0x7f in raise libc.so\n    #1 0x7f in "
    assert not sanitized.is_ours(f"{abort}PyThread_exit_thread Python/thread_pthread.h:366")
    assert sanitized.is_ours(f"{abort}ddp_hooks::MessageSender::send() csrc/transport/message_sender.cpp:31 {OURS}")
    assert sanitized.is_ours("ERROR: AddressSanitizer: heap-use-after-free on address 0x7b\n    #0 c10d::Work::wait x")
