"""Delete what orders streams and keeps memory alive, one thing at a time: the pretended device has to notice each.

    python tests/campaigns/mutants.py            every deletion, a few minutes on two cores
    python tests/campaigns/mutants.py NAME ...   some of them, by words of their names
    python tests/campaigns/mutants.py --seeds 60 --none   nothing deleted, so that nothing may be noticed

All deletions are made at once, in a copy of the checkout under build/, each behind a question that an environment
variable answers. Then one after another is made: the fuzzer runs on the pretended device, with one seed after another,
until it notices; a few a test notices that makes what programs rarely do. A deletion that nothing notices is an error,
and so is one whose text is gone.

Not here is what carries the host's own memory: the control group's masks, for which the host itself waits. Nor what
stands twice, because nothing notices when one of the two is gone: a step that opens waits for the used map, after the
end of backward has, for a rank that has joined, whose passes have no end; what is sampled, and gradients on the streams
of other accumulators, are recorded, where autograd records on the accumulator's stream and the end of backward waits
for it. Nor the device's words of a scan (`DeviceAnswer`), which go back to the stream they came from.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPY = ROOT / "build" / "mutants"
COPIED = (
    *("building", "csrc", "ddp_hooks", "ddp_hooks_testing", "tests"),
    *("setup.py", "pyproject.toml", "README.md", "LICENSE"),
)
VARIABLE = "DDP_HOOKS_DELETED"
HEADER = f"""#pragma once
#include <ATen/ops/from_blob.h>

#include <cstdlib>

namespace ddp_hooks {{
inline bool is_deleted(int number) {{
  static const char* const chosen = std::getenv("{VARIABLE}");
  return chosen != nullptr && std::atoi(chosen) == number;
}}
}}  // namespace ddp_hooks
"""


@dataclass(frozen=True)
class Deletion:
    """What is taken out.

    Attributes:
        name: what for.
        file: where, in csrc/, or in ddp_hooks/ if it is Python.
        text: what, once in that file.
        instead: what stands there, where `@` is whether it is deleted; by default a statement that is made or
            not, in Python an expression.
        test: what notices, if not the fuzzer: options for pytest.
    """

    name: str
    file: str
    text: str
    instead: str = ""
    test: str = ""

    @property
    def path(self) -> Path:
        """The file."""
        return ROOT / ("ddp_hooks" if self.file.endswith(".py") else "csrc") / self.file

    def replacement(self, number: int) -> str:
        """Return what stands there if this is the deletion with a number."""
        if self.file.endswith(".py"):
            is_deleted = f'(__import__("os").environ.get("{VARIABLE}") == "{number}")'
            instead = self.instead or f"@ or {self.text}"
        else:
            is_deleted = f"ddp_hooks::is_deleted({number})"
            instead = self.instead or f"if (!@) {{ {self.text} }}"
        return instead.replace("@", is_deleted)


DELETIONS = (
    # --- waits
    Deletion(
        "a message's end is recorded",
        "transport/step_in_flight.cpp",
        "end.record(current_stream(buffer_.device()));",
    ),
    Deletion(
        "events of a bucket's messages are waited for",
        "transport/step_in_flight.cpp",
        "end.block(current_stream(device));",
    ),
    Deletion(
        "not backward's stream waits for messages",
        "transport/step_in_flight.cpp",
        "  here.block(guard.current_stream());",
        "  here.block(guard.current_stream());\n"
        "  const c10::StreamGuard current(@ ? guard.original_stream() : guard.current_stream());",
        test="engine/test_pretend.py -k waits_for_no_message",
    ),
    Deletion(
        "what a group copies back is waited for",
        "transport/launch.cpp",
        "if (waited) waited->synchronize();",
        "if (waited && !@) waited->synchronize();",
        test="engine/test_pretend.py -k copied_back",
    ),
    Deletion(
        "a bucket's future carries the stream on which it is complete",
        "engine/engine.cpp",
        "if (!bucket.getBuffer().is_cpu()) devices.push_back(bucket.getBuffer().device());",
    ),
    Deletion(
        "the hook's stream waits for those on which gradients were accumulated",
        "engine/backward_pass.cpp",
        "    accumulated.block(current_stream(device));",
        test="engine/test_pretend.py -k many_streams",
    ),
    Deletion(
        "the used map is waited for at the end of backward",
        "engine/engine.cpp",
        "  reducer_.wait_for_used_map();\n  average_unmanaged(*step, true);",
        "  if (!@) reducer_.wait_for_used_map();\n  average_unmanaged(*step, true);",
        test="engine/test_pretend.py -k used_map",
    ),
    Deletion(
        "unmanaged gradients are waited for",
        "transport/unmanaged_gradients.cpp",
        "  if (under_way) under_way->synchronize();",
        test="engine/test_pretend_counts.py -k unmanaged",
    ),
    Deletion(
        "the host waits for a scan's answer",
        "kernels/device_answer.h",
        "    copied_.synchronize();\n    under_way_ = false;",
        "    if (!@) copied_.synchronize();\n    under_way_ = false;",
    ),
    Deletion(
        "where a scan's answer is there is recorded",
        "kernels/device_answer.h",
        "    copied_.record(stream);",
    ),
    Deletion(
        "where gradients were accumulated is recorded",
        "engine/backward_pass.cpp",
        "    accumulated.record(stream);",
        test="engine/test_pretend.py -k many_streams",
    ),
    # --- memory that is held
    Deletion(
        "gradients of held buckets are kept until they are sent",
        "engine/backward_pass.cpp",
        "  hold(index);\n  if (index",
        "  if (@) step_->held.emplace_back();\n  if (!@) hold(index);\n  if (index",
        test="'engine/test_unusual_passes.py::test_same_as_plain[bucket_dropped_before_the_last-held-native]'",
    ),
    Deletion(
        "gradients of earlier buckets are kept until they are sent",
        "engine/backward_pass.cpp",
        "    as_held.emplace_back(reducer_, layout_->buckets[place], step_->held[place]);",
        test="engine/test_unusual_passes.py -k looked_into",
    ),
    Deletion(
        "pinned memory of an answer is held until the host has read it",
        "kernels/device_answer.h",
        "    under_way_ = true;",
        "    under_way_ = true;\n"
        "    if (@) on_host_ = at::from_blob(on_host_.data_ptr(), on_host_.sizes(), at::TensorOptions(at::kInt));",
    ),
    Deletion(
        "pinned memory of an answer that nobody waits for is held until it is there",
        "kernels/device_answer.h",
        "    if (!under_way_) return;",
        "    if (!under_way_ || @) return;",
        test="engine/test_pretend.py -k pass_that_fails",
    ),
    Deletion(
        "a packed message is kept until it is scattered",
        "transport/message_sender.cpp",
        "               scatter(packed, to);\n               keep_for_stream(packed);",
        "               scatter(packed, to);\n               if (!@) keep_for_stream(packed);",
        test="engine/test_pretend.py -k 'moves and (packed or rows)'",
    ),
    Deletion(
        "what lay in gaps is kept until it is put back",
        "transport/message_sender.cpp",
        "keep_for_stream(content);",
        test="engine/test_pretend.py -k gap_that",
    ),
    Deletion(
        "broadcast contributions are kept until they are added up",
        "transport/direct_sender.cpp",
        "              keep_for_stream(received.memory);",
        test="engine/test_pretend.py -k 'moves and broadcast'",
    ),
    Deletion(
        "gradients are kept until owners' sums are put back into them",
        "transport/direct_sender.cpp",
        "    keep_for_stream(places);\n  }",
        "    if (!@) keep_for_stream(places);\n  }",
        test="engine/test_pretend.py -k 'dropped and owner'",
    ),
    Deletion(
        "gradients are kept until units are scattered into them",
        "transport/message_sender.cpp",
        "for (const at::Tensor& gradient : kept) keep_for_stream(gradient);",
        test="engine/test_pretend.py -k dropped_within_backward",
    ),
    Deletion(
        "gradients are kept until contributions are added up in them",
        "transport/direct_sender.cpp",
        "              keep_for_stream(places);",
        test="engine/test_pretend.py -k dropped_within_backward",
    ),
    Deletion(
        "gradients are kept until what hosts have added up is put into them",
        "transport/host_sender.cpp",
        "    keep_for_stream(places_);",
        test="transport/test_hosts_on_streams.py -k dropped",
    ),
    Deletion(
        "what hosts add up is kept if it cannot be sent",
        "transport/host_sender.cpp",
        "    keep_for_stream(results_);",
        test="transport/test_hosts_on_streams.py -k could_not_be",
    ),
    Deletion(
        "unmanaged gradients are kept until their average is copied into them",
        "transport/unmanaged_gradients.cpp",
        "    keep_for_stream(gradient);",
        test="engine/test_pretend.py -k unfrozen",
    ),
    Deletion(
        "messages under way hold their memory",
        "transport/staging.h",
        "    return buffer.narrow(0, 0, numel);",
        "    if (@) return at::for_blob(buffer.data_ptr(), {numel}).options(buffer.options())"
        ".target_device(buffer.device()).make_tensor();\n"
        "    return buffer.narrow(0, 0, numel);",
        test="engine/test_failed_collectives.py",
    ),
    Deletion(
        "what a completion has packed is kept if it cannot be sent",
        "transport/staging.h",
        "    keep_for_stream(buffer);",
        test="transport/test_hosts_on_streams.py -k could_not_be",
    ),
    Deletion(
        "what a message of a step took is nobody else's in that step",
        "transport/staging.h",
        "    at::Tensor& buffer = buffers_[step.next_staging++];",
        "    if (@) step.next_staging = 1;\n    at::Tensor& buffer = buffers_[@ ? 0 : step.next_staging++];",
    ),
    Deletion(
        "memory of messages that are not back is not taken again",
        "transport/staging.h",
        "if (messages_not_back_ && *messages_not_back_ != 0) drop();",
        test="engine/test_failed_collectives.py",
    ),
    # --- FSDP2
    Deletion(
        "FSDP2: narrow gradients are waited for",
        "fsdp/devices.py",
        "dist.all_to_all_single(received, flat, group=group)",
        "dist.all_to_all_single(received, flat, group=group, async_op=@)",
        test="fsdp/test_fsdp_narrow.py -k travel_in_16_bits",
    ),
    Deletion(
        "FSDP2: sums of hosts are waited for",
        "fsdp/devices.py",
        "dist.reduce_scatter_single(output, flat, op, group)",
        "dist.reduce_scatter_single(output, flat, op, group, @)",
        test="fsdp/test_fsdp_device_hosts.py -k plain_fsdp2",
    ),
    Deletion(
        "FSDP2: gradients without zeros are waited for",
        "fsdp/devices.py",
        "dist.all_to_all_single(received, sent, received_sizes, sent_sizes, self._group)",
        "dist.all_to_all_single(received, sent, received_sizes, sent_sizes, self._group, @)",
        test="fsdp/test_fsdp_device_zeros.py -k plain_fsdp2",
    ),
    Deletion(
        "FSDP2: a shard is kept until hosts have averaged it",
        "fsdp/hosts.py",
        "shard.record_stream(torch.accelerator.current_stream())",
        test="fsdp/test_fsdp_device_hosts.py -k kept_until",
    ),
    Deletion(
        "FSDP2: an answer does not outlive its pass",
        "fsdp/routes.py",
        "now != self._pass or index not in self._answers",
        "(now != self._pass and not @) or index not in self._answers",
        test="fsdp/test_fsdp_narrow.py -k outlive",
    ),
    Deletion(
        "FSDP2: ranks agree on wide gradients",
        "fsdp/devices.py",
        "return WIDE if self._wide.anywhere(self._group, participants.wide) else NARROW",
        "return WIDE if (participants.wide if @ else self._wide.anywhere(self._group, participants.wide)) else NARROW",
        test="fsdp/test_fsdp_narrow.py -k reduced_by_torch",
    ),
)


def main() -> int:
    """Try what is asked for; return the process's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--seeds", type=int, default=300, help="how many the fuzzer tries of each")
    parser.add_argument("--jobs", type=int, default=2, help="how many are tried at once")
    parser.add_argument("--none", action="store_true", help="delete nothing")
    options = parser.parse_args()
    numbered = list(enumerate(DELETIONS, 1))
    chosen = [(n, one) for n, one in numbered if not options.names or any(name in one.name for name in options.names)]
    if not chosen:
        sys.exit(f"expected words of {', '.join(repr(one.name) for one in DELETIONS)}, received {options.names}")
    build()
    if options.none:
        seed = first_noticed(0, "", options.seeds)
        print("nothing deleted: " + ("nothing noticed" if seed is None else f"seed {seed} fails"))
        return 1 if seed is not None else 0

    def try_one(numbered_deletion: tuple[int, Deletion]) -> bool:
        number, deletion = numbered_deletion
        begun = time.monotonic()
        noticed = first_noticed(number, deletion.test, options.seeds)
        by = deletion.test or f"seed {noticed}"
        seconds = time.monotonic() - begun
        print(f"{deletion.name}: {'NOT NOTICED' if noticed is None else f'noticed by {by}'} ({seconds:.0f} s)")
        sys.stdout.flush()
        return noticed is not None

    with ThreadPoolExecutor(options.jobs) as pool:
        return 0 if all(list(pool.map(try_one, chosen))) else 1


def build() -> None:
    """Copy what is built and tested, put the questions in, and compile; what has not changed since is kept."""
    COPY.mkdir(parents=True, exist_ok=True)
    sources = {path: path.read_text() for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp")}
    sources |= {path: path.read_text() for path in (ROOT / "ddp_hooks").rglob("*.py")}
    for number, deletion in enumerate(DELETIONS, 1):
        path = deletion.path
        found = sources[path].count(deletion.text)
        if found != 1:
            sys.exit(f"{deletion.name}: expected its text once in {deletion.file}, found it {found} times")
        text = sources[path].replace(deletion.text, deletion.replacement(number))
        sources[path] = text if path.suffix == ".py" or text.startswith(QUESTION) else QUESTION + text
    for path, text in sources.items():
        write(COPY / path.relative_to(ROOT), text)
    write(COPY / "csrc" / "deleted.h", HEADER)
    for name in COPIED:
        for path in [ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"):
            if path.is_file() and path not in sources and path.suffix not in (".so", ".pyc"):
                target = COPY / path.relative_to(ROOT)
                if not target.exists() or target.read_bytes() != path.read_bytes():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, target)
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        cwd=COPY,
        env={**os.environ, "DDP_HOOKS_TESTING": "1", "DDP_HOOKS_CUDA": "0"},
        check=True,
    )


QUESTION = '#include "deleted.h"\n'


def write(path: Path, text: str) -> None:
    """Write a file if it changes, so that nothing is compiled anew for nothing."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def first_noticed(number: int, test: str, seeds: int) -> int | None:
    """Return the first seed with which the fuzzer notices, or 0 if the test does; None if nothing does."""
    fuzz = [
        "campaigns/fuzz.py",
        "--device",
        "pretend",
        "--seeds",
        f"0:{seeds}",
        "--until-failure",
        "--shrink-seconds",
        "0",
    ]
    run = subprocess.run(
        [sys.executable, *(["-m", "pytest", "-q", "-x", "-n", "0", *shlex.split(test)] if test else fuzz)],
        cwd=COPY / "tests",
        env={**os.environ, "PYTHONPATH": str(COPY), VARIABLE: str(number)},
        capture_output=True,
        text=True,
    )
    found = re.search(r"^seed (\d+) on", run.stdout, re.MULTILINE)
    if run.returncode not in (0, 1) or (not test and (run.returncode == 1) != (found is not None)):
        sys.exit(f"deletion {number} ended with {run.returncode}:\n{run.stdout}\n{run.stderr}")
    if run.returncode == 0:
        return None
    return int(found[1]) if found else 0


if __name__ == "__main__":
    sys.exit(main())
