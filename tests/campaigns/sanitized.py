"""Runs the tests on a build with sanitizers and fails on a report about our code; `make test-asan`, `make test-tsan`.

    python sanitized.py asan|tsan [--quick] [options and tests for pytest]

The sanitizers' runtime is loaded before Python, into the rank processes, too, and what it reports goes to files,
because a process that reports may be killed a moment later or is expected to die. A report about our code fails the run
whatever the tests say. Before the tests, the defects of planted_defects.cpp are run on two ranks: if they are not
reported, the run fails.

Only this extension is instrumented. Of torch, gloo and Python the sanitizers see allocations, copies, mutexes and
threads, but no loads, stores and atomics, so that ThreadSanitizer takes some of what they do for races. Its reports
count when one of the two accesses was made by our code or in a call from it, unless the race is one between the use
and the end of an object that torch counts, see `is_last_drop`, or of the storage of a thread, see `frees_storage`.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from spawn import RankFailure, run_ranks

TESTS = Path(__file__).resolve().parents[1]
BUILDS = {name: TESTS.parent / "build" / name / "lib" for name in ("asan", "tsan")}
# Which functions of planted_defects.cpp ranks 0 and 1 call, with which argument, and what the reports say then.
PLANTED = {
    "asan": [("overflow_heap", 4, "heap-buffer-overflow"), ("shift_too_far", 32, "shift exponent")],
    "tsan": [("count_without_lock", 1000, "data race"), ("free_without_counting", 1000, "data race")],
}
# Beside all tests without processes, for CI. Completions run in threads of the process groups: that is where races are.
QUICK = {
    "asan": [
        "transport/test_coded.py::test_so_many_bytes",
        "transport/test_direct.py::test_same_as_plain_ddp[3-False]",
        "engine/test_equivalence.py::test_every_way_to_pack",
        "serving/test_freezing.py::test_unfrozen_under_any_policy",
        "serving/test_freezing.py::test_unfrozen_after_rebuild",
        "serving/test_freezing.py::test_declared_unused",
        "serving/test_hooks.py::test_random_steps",
        "serving/test_hooks.py::test_exchange_on_a_grid",
        "serving/test_hooks.py::test_module_goes_away",
        "layout/test_units.py::test_every_way_to_send_units",
        "layout/test_units.py::test_masks_that_grow",
        "engine/test_unusual_passes.py",
    ],
    "tsan": [
        "transport/test_coded.py::test_so_many_bytes",
        "transport/test_direct.py::test_same_as_plain_ddp[2-True]",
        "engine/test_equivalence.py::test_every_way_to_pack",
        "serving/test_freezing.py::test_unfrozen_under_any_policy",
        "serving/test_freezing.py::test_rebuilds_by_itself",
        "serving/test_hooks.py::test_random_steps",
        "serving/test_hooks.py::test_exchange_on_a_grid",
        "serving/test_hooks.py::test_watched_by_a_thread",
        "serving/test_hooks.py::test_module_goes_away",
        "layout/test_units.py::test_auto_finds_rows[drops-views]",
        "engine/test_unusual_passes.py::test_statistics_from_a_callback",
    ],
}
# The runtime keeps what was freed for a while, so memory grows that does not grow otherwise.
MEASURES_MEMORY = ["engine/test_unusual_passes.py::test_declared_for_long"]
FRAME = re.compile(r"^ +#\d+ .*$", re.MULTILINE)
# Our two shared libraries by name (sources of headers that were compiled into them have paths of their own).
OURS = re.compile(r"(\b_C-[\w-]+|\b_planted)\.[\w-]+\.so\b|\bcsrc/|\bplanted_defects\.cpp")
# Where a report of ThreadSanitizer says how things came to be, not what happened.
ORIGIN = re.compile(r"^  (Location is|Thread T|Mutex M|As if synchronized)", re.MULTILINE)
ACCESS = re.compile(r"^  (Previous )?(atomic )?(read|write) of size ", re.MULTILINE | re.IGNORECASE)
# What ends the life of memory, or of a mutex or a condition that lies in it, as the innermost frame.
FREES = re.compile(r" +#0 (operator delete(\[\])?\(|free |pthread_(cond|mutex)_destroy )")
# What gives up the thread-local storage of a thread that has ended.
FREES_STORAGE = re.compile(r" +#\d+ (__GI_)?_dl_deallocate_tls .*\(ld-")
# What clears its tables before, in torch's own frames.
DESTROYS_GROUP = re.compile(r" +#\d+ c10d::ProcessGroup::~ProcessGroup\(\) .*\(libtorch_")
# Where torch gives up one of the objects that it counts: in the pointer, or in the destructor of such a class or of a
# part of it, because of torch's own frames a stack has only the innermost. A worker of gloo drops works in its loop;
# of a work that goes there, or with what holds it, the stack may have no more than the vector of its tensors or the
# thread-local state that it was launched with. A registry of torch's holds groups weakly, and so has the last word on a
# group that its owners have dropped.
DROPS = re.compile(
    r" +#\d+ (c10::intrusive_ptr<.*>::(reset(_|_not_null_)?|~intrusive_ptr)\("
    r"|c10d?::(.*::)?(\w*Work|Future|ListImpl|ProcessGroupGloo|StorageImpl|TensorImpl)::~\w+\("
    r"|torch::autograd::(AutogradMeta|DifferentiableViewMeta)::~\w+\("
    r"|c10d::ProcessGroupGloo::runLoop\("
    r"|std::vector<.*\bat::Tensor\b.*>::~vector\(\) .*\(libtorch_"
    r"|at::ThreadLocalState::~ThreadLocalState\(\) .*\(libtorch_"
    r"|std::_Rb_tree<.*\bc10::weak_intrusive_ptr<.*\(libtorch_)"
)
# Where a work of torch's uses its own mutex: what is freed is the work then, whoever gave it up. For stacks in which
# nothing that was inlined is shown.
LOCKS_WORK = re.compile(r" +#\d+ c10d::(.*::)?\w*Work::\w+\(.*\(libtorch_")
# Frames that lie between such a drop and what is freed, also where they were compiled into our library.
PARTS_OF_A_DROP = re.compile(r" +#\d+ (void )?(std|__gnu_cxx|c10d?|at)::")
# What our own code does with the count of such an object, which is inlined.
COUNTS_OFF = re.compile(r" +#\d+ c10::detail::atomic_combined_refcount_decrement\(")
SHOWN_FRAMES = 25


def quick_tests(sanitizer: str) -> list[str]:
    """Return the tests for CI: every file that starts no processes, and some tests on ranks."""
    alone = [
        str(path.relative_to(TESTS))
        for path in sorted(TESTS.rglob("test_*.py"))
        if not re.search(r"^(from|import) (spawn|subprocess|multiprocessing)\b", path.read_text(), re.MULTILINE)
    ]
    # One thread has nobody to race with.
    return (alone if sanitizer == "asan" else []) + QUICK[sanitizer]


def runtime_libraries(build: Path) -> str:
    """Return what has to be loaded before Python: the sanitizers' runtime, and the C++ library that they intercept."""
    libraries = list((build / "ddp_hooks").glob("_C-*.so"))
    if not libraries:
        sys.exit(f"expected an extension in {build / 'ddp_hooks'}: build with `make test-asan` or `make test-tsan`")
    output = subprocess.run(["ldd", str(libraries[0])], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"lib(asan|tsan|ubsan|stdc\+\+)\.so\S* => (/\S+)", output))
    if not found.keys() & {"asan", "tsan"}:
        sys.exit(f"{libraries[0]} needs no sanitizer: it was built without DDP_HOOKS_SANITIZE")
    return ":".join(found[name] for name in ("asan", "tsan", "ubsan", "stdc++") if name in found)


def sanitized_environment(build: Path, logs: Path) -> dict[str, str]:
    """Return the environment for processes that load the build and report into the folder ``logs``."""
    options = {
        # Python and torch leave much to the end of the process. An abort is a report, too: of our assertions, say.
        "ASAN_OPTIONS": f"detect_leaks=0:verify_asan_link_order=0:handle_abort=1:log_path={logs}/asan",
        # Its runtime ignores log_path beside AddressSanitizer's.
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        # Mutexes of torch and gloo have to be seen, though these are not instrumented.
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=0:report_signal_unsafe=0:history_size=7"
        f":exitcode=0:log_path={logs}/tsan",
    }
    mine = {name: ":".join(filter(None, [value, os.environ.get(name)])) for name, value in options.items()}
    path = os.pathsep.join(filter(None, [str(build), str(TESTS / "tools"), os.environ.get("PYTHONPATH")]))
    mine |= {"PYTHONPATH": path, "LD_PRELOAD": runtime_libraries(build), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **mine, "DDP_HOOKS_RANKS_KEPT": "6", "DDP_HOOKS_RANKS_FORK": "0"}


def fix_addresses() -> None:
    """Turn the randomisation of addresses off for what we start: ThreadSanitizer fails where it is a wide one."""
    libc = ctypes.CDLL(None)
    addr_no_randomize, ask = 0x0040000, 0xFFFFFFFF
    # Where that is forbidden, the sanitizer itself says what is wrong, if anything is.
    libc.personality(libc.personality(ask) | addr_no_randomize)


def reports_in(text: str) -> list[str]:
    """Split what the sanitizers wrote into reports."""
    found = []
    for part in re.split(r"^=+$", text, flags=re.MULTILINE):
        if re.search(r"(WARNING: ThreadSanitizer|(ERROR|FATAL): \w+Sanitizer)", part):
            found.append(part.strip("\n"))
        else:
            found += re.findall(r"^.*: runtime error: .*\n(?: +#\d+ .*\n)*", part, re.MULTILINE)
    return found


def is_ours(report: str) -> bool:
    """Say whether a report counts: everything but aborts and ThreadSanitizer's about others, and torch's counting."""
    if "AddressSanitizer: ABRT" in report:
        # torch's threads that take the GIL at the interpreter's end abort, too; tests look at how processes ended.
        return any(map(OURS.search, FRAME.findall(report)))
    if "WARNING: ThreadSanitizer" not in report:
        return True
    # Sections are set apart by empty lines.
    sections = [section for section in report.split("\n\n") if not ORIGIN.match(section)]
    return any(OURS.search(frame) for section in sections for frame in FRAME.findall(section)) and not (
        "ThreadSanitizer: data race (" in report and is_about_an_end([part for part in sections if ACCESS.search(part)])
    )


def is_about_an_end(accesses: list[str]) -> bool:
    """Say whether a race is one between a use and a later end that ThreadSanitizer cannot see to be later."""
    return (
        len(accesses) == 2
        and accesses[1].startswith("  Previous ")
        and (frees_storage(accesses[0]) or is_last_drop(accesses))
    )


def frees_storage(access: str) -> bool:
    """Say whether the C library frees the thread-local storage of a thread that has ended.

    It does so in whatever thread starts, ends or joins another one next, after the kernel has told it that the owner
    has ended, which no call shows. The destructors that the owner ran at its end then look like a race with that.
    """
    frames = FRAME.findall(access)
    return bool(frames and FREES.match(frames[0])) and any(map(FREES_STORAGE.match, frames[1:3]))


def is_last_drop(accesses: list[str]) -> bool:
    """Say whether a race is only one because ThreadSanitizer does not see how torch counts references.

    Who drops the last reference to a tensor, a future, a work or a group frees it, in whatever thread. What another
    thread did with it before that thread dropped its own reference happened before, because a drop is an atomic
    operation with acquire and release. But as most drops are made in torch's libraries, where nothing is instrumented,
    of two drops one at least is not seen, and nothing of ours can announce it: the worker of a process group makes no
    call of ours after its last use.

    So the use has to come first and the freeing second (the other way round it is a use after free), and either the
    use is the dropping itself, by our code, or what is freed belongs to an object of torch. What is ours is not
    excluded: whoever counts it is instrumented. That our code touches an object of torch after its drop is not seen
    here if that happens before the object is freed; `make test-asan` sees it if that happens after.
    """
    freeing, using = map(FRAME.findall, accesses)
    if not freeing or (using and FREES.match(using[0])):
        return False
    if not FREES.match(freeing[0]):
        return any(map(DESTROYS_GROUP.match, freeing[:3]))
    if using and "pthread_mutex_lock" in using[0] and any(map(LOCKS_WORK.match, using[1:2])):
        return True
    # The innermost frames are those of std::atomic.
    return any(map(COUNTS_OFF.match, using[:3])) or frees_in_drop(freeing[1:])


def frees_in_drop(callers: list[str]) -> bool:
    """Say whether what calls ``free`` is the drop of an object of torch, and no destructor of ours within that drop."""
    for frame in callers:
        if "ddp_hooks::" in frame:
            return False
        if DROPS.match(frame):
            return True
        if OURS.search(frame) and not PARTS_OF_A_DROP.match(frame):
            return False
    return False


def shortened(report: str) -> str:
    """Leave out the frames of each stack that lie far from where it happened."""
    lines = []
    for line in report.splitlines():
        number = re.match(r" +#(\d+) ", line)
        if number is None or int(number[1]) < SHOWN_FRAMES:
            lines.append(line[:400])
    return "\n".join(lines)


def run_sanitized(sanitizer: str, arguments: list[str]) -> tuple[int, list[str]]:
    """Run Python with the sanitizer; return its exit code and what was reported in any of its processes."""
    with tempfile.TemporaryDirectory(prefix="ddp_hooks_sanitized_") as folder:
        environment = sanitized_environment(BUILDS[sanitizer], Path(folder))
        # What the runtime cannot write into its files, it writes here.
        errors = Path(folder) / "stderr"
        with errors.open("w") as stream:
            code = subprocess.run([sys.executable, *arguments], env=environment, cwd=TESTS, stderr=stream).returncode
        reports = [
            report for path in sorted(Path(folder).iterdir()) for report in reports_in(path.read_text(errors="replace"))
        ]
        if code != 0:
            print(errors.read_text(errors="replace")[-20_000:], file=sys.stderr)
    return code, reports


def plant(rank: int, sanitizer: str) -> None:
    """Run a planted defect in a rank process, in a library that lies beside the extension."""
    import ddp_hooks

    folder = Path(ddp_hooks.__file__).parent
    if folder.parent != BUILDS[sanitizer].resolve():
        raise RuntimeError(f"expected ddp_hooks from {BUILDS[sanitizer]}, received {folder}")
    (library,) = folder.glob("_planted.*.so")
    name, argument, _ = PLANTED[sanitizer][rank]
    getattr(ctypes.CDLL(str(library)), name)(argument)


def check_planted(sanitizer: str) -> None:
    """Exit unless the planted defects are reported."""
    _, reports = run_sanitized(sanitizer, [__file__, "--plant", sanitizer])
    reported = "\n".join(filter(is_ours, reports))
    for function, _, words in PLANTED[sanitizer]:
        if words not in reported or function not in reported:
            sys.exit(f"expected a report of {words!r} in {function}, which is planted; received {reported or 'none'}")
    print(f"The defects that were planted are reported: {', '.join(words for _, _, words in PLANTED[sanitizer])}")


def main() -> int:
    """Check that defects are found, run the tests, and show what was reported."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sanitizer", choices=list(BUILDS))
    parser.add_argument("--quick", action="store_true", help="only the tests that CI runs")
    chosen, options = parser.parse_known_args()
    if chosen.sanitizer == "tsan":
        fix_addresses()
    check_planted(chosen.sanitizer)
    if chosen.quick:
        options += quick_tests(chosen.sanitizer)
    # pytest's own handler for signals would come before the sanitizer's; its cache would forget what failed elsewhere.
    plain = ["-m", "pytest", "-p", "no:faulthandler", "-p", "no:cacheprovider", "--capture=sys", "--all"]
    plain += [f"--deselect=tests/{test}" for test in MEASURES_MEMORY]
    code, reports = run_sanitized(chosen.sanitizer, [*plain, *options])
    ours = list(filter(is_ours, reports))
    for report in ours:
        print(f"\n{'=' * 100}\n{shortened(report)}")
    others = len(reports) - len(ours)
    print(f"\n{chosen.sanitizer}: {len(ours)} reports about our code, {others} about others or torch's counting")
    return code or int(bool(ours))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--plant"]:
        try:
            run_ranks(2, plant, sys.argv[2], timeout=300.0)
        except RankFailure as failure:
            print(failure, file=sys.stderr)
    else:
        sys.exit(main())
