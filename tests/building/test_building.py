"""How the extensions are compiled: which torches share one, and what is compiled again."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from building import jobs, kernels, torches  # noqa: E402


def fake_torch(folder: Path, version: str, headers: dict[str, str]) -> torches.Torch:
    package = folder / version / "torch"
    for name, text in {"caffe2/core/macros.h": version, **headers}.items():
        path = package / "include" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (package / "version.py").write_text(f"__version__ = '{version}+cu130'\ngit_version = 'c{version}'\n")
    return torches.read(package)


def test_releases_with_the_same_headers_share_an_extension(tmp_path: Path) -> None:
    first = fake_torch(tmp_path, "2.12.0", {"c10/a.h": "1"})
    patch = fake_torch(tmp_path, "2.12.1", {"c10/a.h": "1"})
    changed = fake_torch(tmp_path, "2.12.2", {"c10/a.h": "2"})
    more = fake_torch(tmp_path, "2.12.3", {"c10/a.h": "1", "c10/b.h": ""})
    # What a minor version changes need not show in a header.
    minor = fake_torch(tmp_path, "2.13.0", {"c10/a.h": "1"})
    assert torches.group([first, patch, changed, more, minor]) == [[first, patch], [changed], [more], [minor]]


def test_the_installed_torch_is_described_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDP_HOOKS_TORCHES", raising=False)
    (found,) = torches.find()
    assert found.version == torch.__version__.partition("+")[0]
    assert found.commit == torch.version.git_version
    assert all(folder.is_dir() for folder in found.include_folders)
    monkeypatch.setenv("DDP_HOOKS_TORCHES", os.pathsep.join([str(found.folder)] * 2))
    assert torches.find() == [found, found]


def test_only_what_has_changed_is_compiled_again(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a compiler")
    header, source, output = tmp_path / "a.h", tmp_path / "a.cpp", tmp_path / "out" / "a.o"
    header.write_text("int a();\n")
    source.write_text('#include "a.h"\nint a() { return 1; }\n')

    def compile_once(*flags: str) -> bool:
        command = (compiler, *flags, "-MMD", "-MF", f"{output}.d", "-c", str(source), "-o", str(output))
        before = output.stat().st_mtime_ns if output.exists() else 0
        jobs.run_all([jobs.Job(output, [source], command)])
        return output.stat().st_mtime_ns != before

    assert compile_once()
    assert not compile_once()
    header.write_text("int a();\nint b();\n")
    assert compile_once()
    assert not compile_once()
    assert compile_once("-O1")
    source.write_text("what is this")
    with pytest.raises(jobs.Failure, match="error"):
        compile_once("-O1")
    with pytest.raises(jobs.Failure, match="error"):  # as long as it is wrong
        compile_once("-O1")


def test_what_goes_into_a_package_stands_alone(tmp_path: Path) -> None:
    output, folder = tmp_path / "package" / "a.so", tmp_path / "logs"
    job = jobs.Job(output, [], ("true",), act=lambda: output.touch(), log_folder=folder)
    jobs.run_all([job])
    assert job.is_done()
    assert [path.name for path in output.parent.iterdir()] == ["a.so"]


def test_kernels_are_assembled_for_the_oldest_gpu_of_each_generation(tmp_path: Path) -> None:
    assembler = tmp_path / "ptxas"
    assembler.write_text(
        """#!/bin/sh
echo "This option is ignored for programs with .target sm_70 or higher."
echo "Allowed values: 'compute_86','sm_100','sm_100a','sm_103','sm_75','sm_60','sm_86','sm_80','sm_90','sm_90a'"
"""
    )
    assembler.chmod(0o755)
    assert kernels.Toolkit("nvcc", str(assembler), "fatbinary").architectures() == [75, 80, 90, 100]


def test_jobs_run_after_what_they_need(tmp_path: Path) -> None:
    done: list[str] = []

    def job(name: str, *needs: jobs.Job) -> jobs.Job:
        def act() -> None:
            done.append(name)
            (tmp_path / name).touch()

        return jobs.Job(tmp_path / name, [], (name,), needs, act)

    first = job("first")
    second, third = job("second", first), job("third", first)
    jobs.run_all([job("last", second, third), third])
    assert done[0] == "first"
    assert done[-1] == "last"
    assert sorted(done) == ["first", "last", "second", "third"]
