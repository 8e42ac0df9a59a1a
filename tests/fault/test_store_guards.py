# SPDX-License-Identifier: Apache-2.0
"""What a store refuses, with the path, the numbers and the remedy, and that nothing on disk has changed then."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from places import BlockDevices
from simulated_disk import SimulatedDisk
from stores import ANY_DISK, loop_device, mounted, slot

from memascend_jax.errors import StoreError
from memascend_jax.storage import blankness, filesystem, formatting, signatures
from memascend_jax.storage.engine import address_of
from memascend_jax.storage.store_errors import StoreIOError
from memascend_jax.storage.tensor_store import TensorSpec, TensorStore

pytestmark = pytest.mark.fault

SPEC = TensorSpec("w", "float32", (5000,), tile_elements=1024)


def digest(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def test_missing_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=rf"cannot open store '{tmp_path}/none': no such file"):
        TensorStore.open(tmp_path / "none", **ANY_DISK)
    with pytest.raises(
        StoreError, match=rf"the directory '{tmp_path}/none' does not exist; create it, or mount"
    ):
        TensorStore.create(tmp_path / "none" / "s", capacity=1, **ANY_DISK)
    with pytest.raises(StoreError, match="does not exist"):
        TensorStore.create(f"{tmp_path}/none/", capacity=1, **ANY_DISK)
    with pytest.raises(StoreError, match="needs at least one path"):
        TensorStore.create([], capacity=1, **ANY_DISK)
    assert list(tmp_path.iterdir()) == []


def test_existing_store_and_foreign_files_are_left_alone(tmp_path: Path) -> None:
    store_path, foreign = tmp_path / "s", tmp_path / "thesis.txt"
    with TensorStore.create(store_path, specs=[SPEC], **ANY_DISK) as store:
        store.put("w", np.ones(5000, np.float32))
        store.commit()
    foreign.write_bytes(b"years of work" * 1000)
    before = digest(store_path), digest(foreign)
    with pytest.raises(StoreError, match=r"there is one already; open it, .*overwrite=True \(--overwrite\)"):
        TensorStore.create(store_path, capacity="1MiB", **ANY_DISK)
    for overwrite in (False, True):
        with pytest.raises(StoreError, match=r"thesis.txt': it holds data of an unknown kind"):
            TensorStore.create(foreign, capacity="1MiB", overwrite=overwrite, **ANY_DISK)
    with pytest.raises(StoreError, match="not a memascend store"):
        TensorStore.open(foreign, **ANY_DISK)
    with pytest.raises(StoreError, match="not a memascend store"):
        TensorStore.wipe(foreign)
    # One bad path among good ones stops before anything is written to any.
    with pytest.raises(StoreError, match=r"thesis\.txt"):
        TensorStore.create([store_path, foreign], capacity="1MiB", overwrite=True, **ANY_DISK)
    assert (digest(store_path), digest(foreign)) == before
    with TensorStore.create(
        [store_path, foreign],
        capacity="1MiB",
        overwrite=True,
        erase_foreign_data=[str(foreign)],
        **ANY_DISK,
    ) as store:
        assert store.names() == []


def test_failed_create_removes_only_what_it_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"needs 18,446|cannot reserve|bytes"):
        TensorStore.create([tmp_path / "a", tmp_path / "b"], capacity=1 << 60, **ANY_DISK)
    assert list(tmp_path.iterdir()) == []


def test_second_opener_is_told_who_holds_the_store(tmp_path: Path) -> None:
    with TensorStore.create(tmp_path, capacity="1MiB", **ANY_DISK) as store:
        store.commit()
        code = (
            "from memascend_jax.storage.tensor_store import TensorStore\n"
            f"TensorStore.open({str(tmp_path)!r}, direct_io='optional')"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode != 0
        assert f"is in use by process {os.getpid()}; close it there first" in done.stderr
        with pytest.raises(StoreError, match="is in use by process"):
            TensorStore.open(tmp_path, read_only=True, **ANY_DISK)
    first = TensorStore.open(tmp_path, read_only=True, **ANY_DISK)
    second = TensorStore.open(tmp_path, read_only=True, **ANY_DISK)
    first.close()
    second.close()


def test_closed_and_read_only_stores_say_so(tmp_path: Path) -> None:
    store = TensorStore.create(tmp_path, specs=[SPEC], **ANY_DISK)
    store.put("w", np.ones(5000, np.float32))
    store.commit()
    batch = store.batch()
    store.close()
    store.close()
    for use in (
        lambda: store.get("w"),
        lambda: store.put("w", np.zeros(1)),
        lambda: store.commit(),
        lambda: store.names(),
        lambda: store.verify(),
        lambda: batch.submit(),
        lambda: store.inspect(),
    ):
        with pytest.raises(StoreError, match="is closed; open it again"):
            use()
    before = digest(tmp_path / "memascend.store")
    with TensorStore.open(tmp_path, read_only=True, **ANY_DISK) as store:
        assert store.get("w").sum() == 5000
        assert store.verify().ok
        for change in (
            lambda: store.put("w", np.zeros(5000, np.float32)),
            lambda: store.commit(),
            lambda: store.declare(TensorSpec("v", "float32", (1,))),
            lambda: store.remove("w"),
            lambda: store.scratch("x", 1),
        ):
            with pytest.raises(StoreError, match="was opened read-only"):
                change()
    assert digest(tmp_path / "memascend.store") == before


def test_wrong_uses_are_refused_with_the_numbers(tmp_path: Path) -> None:
    with TensorStore.create(tmp_path, capacity="256KiB", specs=[SPEC], **ANY_DISK) as store:
        with pytest.raises(StoreError, match=r"tensor 'w': its tile 0 of 5 was never written|never written"):
            store.get("w")
        store.put("w", np.ones(5000, np.float32))
        for use, message in [
            (lambda: store.get("v"), r"no tensor 'v' in store .* \(1 tensors\)"),
            (lambda: store.batch().read("v", 0), "no tensor 'v'"),
            (lambda: store.batch().write_tile("w", 5, 0), "it has tiles 0 to 4"),
            (lambda: store.batch().read("w", 0, 4096, 905), r"elements \[4,096, 5,001\) .* it has 5,000"),
            (lambda: store.batch().read("w", 0, 7, 1), r"byte 28 is not a multiple of the block of 4,096"),
            (lambda: store.read_elements("w", -1, 2), "cannot read elements"),
            (lambda: store.write_elements("w", 5, np.ones(10, np.float32)), "whole tiles of 1,024"),
            (
                lambda: store.write_elements("w", 0, np.ones(1024)),
                "cannot write float64 to tensor 'w' of float32",
            ),
            (lambda: store.put("c", np.ones(3, np.complex64)), "unknown dtype"),
            (lambda: store.put("o", np.array([object()])), "unknown dtype"),
            (
                lambda: store.put("big", np.ones(1 << 18)),
                r"no room for tensor 'big'.*4,194,304 bytes \(4.00 MiB\)",
            ),
            (lambda: store.declare(SPEC), "'w' exists already"),
            (
                lambda: store.declare(TensorSpec("t", "float32", (999,), tile_elements=100)),
                "multiple of 1,024 elem",
            ),
            (lambda: store.declare(TensorSpec("", "float32", (1,))), "a name is 1 to 4096|1 to 4,096"),
            (lambda: store.declare(TensorSpec("n", "float32", (-1,))), "none negative"),
            (lambda: store.declare(TensorSpec("h", "float32", (1 << 40, 1 << 40))), "is more than"),
            (lambda: store.commit(bytes(1 << 20)), r"run state takes 1,0.* has room for"),
            (
                lambda: store.declare(TensorSpec("s", "float32", (2, 2), global_shape=(4, 4), start=(3, 0))),
                "outside the global shape",
            ),
        ]:
            with pytest.raises(StoreError, match=message):
                use()
        assert store.commit() == 1
        assert store.names() == ["w"]
    for arguments, message in [
        ({"capacity": "1 elephant"}, "expected a size"),
        ({"capacity": 4096, "scratch_bytes": 8192}, "too small"),
        ({"capacity": 1, "durability": "maybe"}, "must be 'step' or 'checkpoint'"),
        ({"capacity": 1, "block_bytes": 5000}, "power of two"),
        ({"capacity": 1, "weights": (1, 2)}, "2 weights for 1 members"),
        ({"capacity": 1, "weights": (100,)}, "weights from 1 to 64"),
        ({"specs": [SPEC, SPEC]}, "declared twice"),
    ]:
        with pytest.raises(StoreError, match=message):
            TensorStore.create(tmp_path / "x", **arguments, **ANY_DISK)
        assert not (tmp_path / "x").exists()


def test_batch_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    with TensorStore.create(tmp_path, capacity="1MiB", specs=[SPEC], **ANY_DISK) as store:
        ones = np.ones(5000, np.float32)
        store.put("w", ones)
        memory = slot(np.zeros(1024, np.float32))
        for tile, offset, message in [(0, 1, "aligned to 512"), (1, 0, "written twice")]:
            batch = store.batch()
            batch.write_tile("w", 1, address_of(memory))
            batch.write_tile("w", tile, address_of(memory) + offset)
            with pytest.raises(StoreError, match=message):
                batch.submit()
        batch.write_tile("w", 1, address_of(memory))
        batch.read("w", address_of(memory), 0, 1024 + 1)
        with pytest.raises(StoreError, match="read and written in one batch"):
            batch.submit()
        np.testing.assert_array_equal(store.get("w"), ones)


def test_directories_fifos_and_character_devices_are_no_members(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/null")):
        with pytest.raises(StoreError, match="neither a regular file nor a block device"):
            TensorStore.create(path, capacity=1, **ANY_DISK)
        with pytest.raises(StoreError, match="neither a regular file nor a block device"):
            TensorStore.open(path, **ANY_DISK)


def test_unprivileged_user_is_told_that_the_path_is_not_writable() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to drop privileges")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder, hidden = Path(name), Path(name) / "hidden"
        folder.chmod(0o755)
        hidden.mkdir(mode=0o700)
        TensorStore.create(folder, capacity="1MiB", **ANY_DISK).close()
        opened, created, unseen, unseen_new = messages_as_nobody(
            lambda: TensorStore.open(folder),
            lambda: TensorStore.create(folder / "new", capacity=1),
            lambda: TensorStore.open(hidden / "s"),
            lambda: TensorStore.create(hidden / "s", capacity=1),
        )
    remedy = "give a path that this user may write, or open the store read-only"
    assert opened == f"cannot open store '{folder}/memascend.store': Permission denied [EACCES]; {remedy}"
    assert created == f"cannot open store '{folder}/new': Permission denied [EACCES]; {remedy}"
    for message in (unseen, unseen_new):
        assert message.startswith(f"cannot open store '{hidden}/s': Permission denied [EACCES]")


def messages_as_nobody(*attempts: Callable[[], object]) -> list[str]:
    """Returns what each attempt raises in a child process without privileges."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setuid(65534)
            for attempt in attempts:
                message = "no error"
                try:
                    attempt()
                except StoreError as error:
                    message = str(error)
                except BaseException as error:
                    message = repr(error)
                os.write(writer, f"{message}\n".encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as lines:
        return lines.read().splitlines()


def test_tmpfs_is_refused_unless_allowed(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "ram", "-t", "tmpfs", "-o", "size=16m") as folder:
        with pytest.raises(StoreError, match=r"is on tmpfs, which is memory, not a disk.*direct_io=optional"):
            TensorStore.create(folder, capacity="1MiB")
        assert list(folder.iterdir()) == []
        with TensorStore.create(folder, capacity="1MiB", direct_io="optional") as store:
            assert not store.direct
            assert "takes memory, not disk" in store.notes[0]
            store.put("w", np.arange(10))
            store.commit()
            assert store.get("w").tolist() == list(range(10))


def test_file_system_without_direct_io_is_refused_unless_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As NFS, FUSE and some overlays answer: the file is made, then the open fails."""
    really_open = os.open

    def open_without_direct(path: str, flags: int, *rest: int, **more: int) -> int:
        fd = really_open(path, flags & ~os.O_DIRECT, *rest, **more)
        if flags & os.O_DIRECT:
            os.close(fd)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return fd

    monkeypatch.setattr(os, "open", open_without_direct)
    with pytest.raises(
        StoreIOError, match=rf"cannot open '{tmp_path}/.*' with O_DIRECT: .*\[EINVAL\].*direct_io=optional"
    ):
        TensorStore.create(tmp_path, capacity="1MiB")
    assert list(tmp_path.iterdir()) == []
    with TensorStore.create(tmp_path, capacity="1MiB", direct_io="optional") as store:
        assert not store.direct
        assert "cannot do O_DIRECT" in store.notes[0]
        said = [record.message for record in caplog.records]
        assert said == [f"store '{tmp_path}/memascend.store' {store.fallbacks[0]}"]
        assert store.inspect()["fallbacks"][0]["used"] == "the page cache"
        store.put("w", np.arange(10))
        store.commit()
    TensorStore.open(tmp_path, direct_io="optional").close()
    assert len(caplog.records) == 1
    before = digest(tmp_path / "memascend.store")
    with pytest.raises(StoreIOError, match="with O_DIRECT"):
        TensorStore.open(tmp_path)
    assert digest(tmp_path / "memascend.store") == before


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EIO])
def test_disk_that_refuses_the_first_write_is_named_and_nothing_stays(tmp_path: Path, code: int) -> None:
    disk = SimulatedDisk()
    disk.refuse = lambda kind, path, offset: code if kind == "write" else 0
    with pytest.raises(StoreIOError, match=rf"store '{tmp_path}/memascend.store'") as caught:
        TensorStore.create(tmp_path, capacity="1MiB", direct_io="off", make_engine=disk.engine)
    assert caught.value.errno == code
    assert list(tmp_path.iterdir()) == []


def test_overlay_is_a_file_system_like_any_that_writes_directly(tmp_path: Path) -> None:
    """Containers: what counts is the real write, not the name of the file system."""
    layers = [tmp_path / name for name in ("lower", "upper", "work")]
    for layer in layers:
        layer.mkdir()
    options = "lowerdir={},upperdir={},workdir={}".format(*layers)
    with mounted("overlay", tmp_path / "merged", "-t", "overlay", "-o", options) as folder:
        try:
            store = TensorStore.create(folder, capacity="1MiB")
        except StoreError as error:
            assert str(folder) in str(error)
            assert "direct_io=optional" in str(error)
            assert list(folder.iterdir()) == []
            return
        with store:
            assert store.inspect()["members"][0]["file_system"] == "overlay"
            store.put("w", np.arange(10))
            store.commit()
        with TensorStore.open(folder) as store:
            assert store.get("w").tolist() == list(range(10))


def test_full_disk_is_found_at_create_with_the_numbers(tmp_path: Path) -> None:
    with loop_device(tmp_path / "image", 32 << 20) as device:
        subprocess.run(["mkfs.ext4", "-q", device], check=True)
        with mounted(device, tmp_path / "disk") as folder:
            with pytest.raises(
                StoreIOError, match=r"cannot reserve .*\(6\d.\d\d MiB\).*bytes \(.*\) are free"
            ) as caught:
                TensorStore.create(folder, capacity="64MiB")
            assert caught.value.errno == 28
            assert not (folder / "memascend.store").exists()
            with TensorStore.create(folder, capacity="4MiB") as store:
                store.put("w", np.arange(1000))
                store.commit()
            before = digest(folder / "memascend.store")
            with pytest.raises(StoreIOError, match="cannot reserve"):
                TensorStore.create([folder, folder / "b"], capacity="64MiB", overwrite=True)
            assert digest(folder / "memascend.store") == before
            assert not (folder / "b").exists()
            # A disk that others fill up afterwards does not matter: everything is reserved.
            with TensorStore.open(folder) as store:
                with (folder / "filler").open("wb") as filler, pytest.raises(OSError, match="No space"):
                    while True:
                        filler.write(bytes(1 << 20))
                        filler.flush()
                for round_number in range(3):
                    store.put("w", np.arange(1000) + round_number)
                    store.put(f"more{round_number}", np.arange(50_000))
                    store.commit()


def test_copy_with_holes_is_reserved_again_and_a_full_disk_is_found_when_it_is_opened(tmp_path: Path) -> None:
    with TensorStore.create(tmp_path / "s", capacity="24MiB", **ANY_DISK) as store:
        store.put("w", np.arange(1000))
        store.commit()
    with loop_device(tmp_path / "image", 64 << 20) as device:
        subprocess.run(["mkfs.ext4", "-q", device], check=True)
        with mounted(device, tmp_path / "disk") as folder:
            copy = folder / "memascend.store"
            subprocess.run(["cp", "--sparse=always", tmp_path / "s", copy], check=True)
            held = copy.stat().st_blocks * 512
            assert held < 8 << 20
            with (folder / "filler").open("wb") as filler:
                os.posix_fallocate(filler.fileno(), 0, 40 << 20)
            before = digest(copy)
            with pytest.raises(StoreIOError, match=r"cannot reserve .* are free"):
                TensorStore.open(copy)
            with TensorStore.open(copy, read_only=True) as store:
                assert store.get("w").tolist() == list(range(1000))
            assert digest(copy) == before
            (folder / "filler").unlink()
            with TensorStore.open(copy) as store:
                assert store.get("w").tolist() == list(range(1000))
            assert copy.stat().st_blocks * 512 >= copy.stat().st_size


def test_read_only_file_system_is_named(tmp_path: Path) -> None:
    with loop_device(tmp_path / "image", 32 << 20) as device:
        subprocess.run(["mkfs.ext4", "-q", device], check=True)
        with (
            mounted(device, tmp_path / "disk") as folder,
            TensorStore.create(folder, capacity="1MiB") as store,
        ):
            store.put("w", np.arange(10))
            store.commit()
        with mounted(device, tmp_path / "disk", "-o", "ro") as folder:
            with pytest.raises(
                StoreIOError, match=r"Read-only file system \[EROFS\]; the file system is read-only"
            ):
                TensorStore.open(folder)
            with pytest.raises(StoreIOError, match="EROFS"):
                TensorStore.create(folder / "new", capacity=1)
            with TensorStore.open(folder, read_only=True) as store:
                assert store.get("w").tolist() == list(range(10))


def test_mounted_device_is_refused(tmp_path: Path) -> None:
    with loop_device(tmp_path / "image", 32 << 20) as device:
        subprocess.run(["mkfs.ext4", "-q", device], check=True)
        with (
            mounted(device, tmp_path / "disk"),
            pytest.raises(
                StoreIOError, match=rf"'{device}': Device or resource busy \[EBUSY\]; it is mounted"
            ),
        ):
            TensorStore.create(device, capacity="1MiB", erase_foreign_data=True)


FORMATS = {
    "ext4": (["mkfs.ext4", "-q"], "an ext2/3/4 file system"),
    "xfs": (["mkfs.xfs", "-q"], "an XFS file system"),
    "btrfs": (["mkfs.btrfs", "-q"], "a btrfs file system"),
    "f2fs": (["mkfs.f2fs", "-q"], "an F2FS file system"),
    "ntfs": (["mkfs.ntfs", "-Q", "-F"], "an NTFS file system"),
    "exfat": (["mkfs.exfat"], "an exFAT file system"),
    "vfat": (["mkfs.vfat"], "a FAT"),
    "swap": (["mkswap", "-q"], "swap space"),
    "luks": (
        ["cryptsetup", "luksFormat", "-q", "--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"],
        "a LUKS container",
    ),
    "gpt": (["sgdisk", "-n", "1:0:0"], "a GPT partition table"),
    "mbr": (["sfdisk", "-q", "--label", "dos"], "an MBR partition table"),
}
#: What a tool reads on stdin: a passphrase, a partition.
INPUTS = {"luks": b"passphrase", "mbr": b"start=2048\n"}


@pytest.mark.parametrize("kind", FORMATS)
def test_device_formatted_by_its_own_tool_is_refused(tmp_path: Path, kind: str) -> None:
    command, name = FORMATS[kind]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    with loop_device(tmp_path / "image", 400 << 20) as device:
        tail = ["-"] if kind == "luks" else []
        subprocess.run(
            [*command, device, *tail], check=True, capture_output=True, input=INPUTS.get(kind, b"")
        )
        refuse_then_erase(device, name)


@pytest.mark.parametrize("signature", signatures.SIGNATURES, ids=lambda s: f"{s.name}@{s.offset}")
def test_device_with_any_known_signature_is_refused(
    signature: signatures.Signature, block_devices: BlockDevices
) -> None:
    device = block_devices.blank("device")
    with open(device, "r+b") as raw:
        raw.seek(signature.offset, 2 if signature.offset < 0 else 0)
        raw.write(signature.magic)
    refuse_then_erase(device, signature.name)


@pytest.mark.parametrize("signature", signatures.SIGNATURES, ids=lambda s: f"{s.name}@{s.offset}")
def test_every_known_signature_is_recognised(signature: signatures.Signature) -> None:
    head, tail = bytearray(signatures.HEAD_BYTES), bytearray(signatures.TAIL_BYTES)
    where = head if signature.offset >= 0 else tail
    start = signature.offset if signature.offset >= 0 else len(tail) + signature.offset
    where[start : start + len(signature.magic)] = signature.magic
    assert signatures.foreign_signature(bytes(head), bytes(tail)) == signature.name


def test_blank_is_blank_and_anything_else_is_not() -> None:
    blank = bytes(signatures.HEAD_BYTES), bytes(signatures.TAIL_BYTES)
    assert signatures.foreign_signature(*blank) is None
    assert signatures.foreign_signature(blank[0][:-1] + b"\1", blank[1]) == "data of an unknown kind"
    assert signatures.foreign_signature(blank[0], b"\1" + blank[1][1:]) == "data of an unknown kind"


@pytest.mark.parametrize("where", [0, 510, 4096, 200_000, -512, -100_000])
def test_unknown_data_on_a_device_is_refused_and_left_as_it_was(tmp_path: Path, where: int) -> None:
    with loop_device(tmp_path / "image", 8 << 20) as device:
        with open(device, "r+b") as raw:
            raw.seek(where, 2 if where < 0 else 0)
            raw.write(b"precious")
        refuse_then_erase(device, "data of an unknown kind")


@pytest.mark.parametrize("where", [262_144, 100_000_001, -131_073, -1])
def test_one_byte_anywhere_on_a_small_device_is_found(block_devices: BlockDevices, where: int) -> None:
    device = block_devices.blank("device")
    with open(device, "r+b") as raw:
        at = raw.seek(where, 2 if where < 0 else 0)
        raw.write(b"\1")
    refuse_then_erase(device, rf"data of an unknown kind \(byte {at:,} is not zero; looked at: all of it\)")


@pytest.mark.parametrize("direct_io", ["required", "off"])
def test_large_device_is_looked_at_in_samples(tmp_path: Path, direct_io: str) -> None:
    nbytes = 5 << 30
    with loop_device(tmp_path / "image", nbytes) as device:
        for begin, end in list(blankness.extents_looked_at(nbytes))[::500]:
            with open(device, "r+b", buffering=0) as raw:
                raw.seek(end - 1)
                raw.write(b"\1")
                with pytest.raises(
                    StoreError, match=rf"byte {end - 1:,} is not zero.*2,048 samples of 64 KiB"
                ):
                    TensorStore.create(device, capacity="1MiB", direct_io=direct_io)
                raw.seek(end - 1)
                raw.write(b"\0")
            assert begin % 4096 == 0
        TensorStore.create(device, capacity="1MiB", direct_io=direct_io).close()


@pytest.mark.parametrize("nbytes", [0, 512, 1 << 30, (1 << 30) + 512, (3 << 40) + 4096])
def test_what_is_looked_at_lies_within_the_device_without_overlap(nbytes: int) -> None:
    extents = list(blankness.extents_looked_at(nbytes))
    assert all(begin % 4096 == 0 for begin, _ in extents)
    assert extents[0][0] == 0
    assert extents[-1][1] == nbytes
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(extents))
    looked = sum(end - begin for begin, end in extents)
    assert looked == nbytes if nbytes <= 1 << 30 else (160 << 20) <= looked < (160 << 20) + 4096
    # Evenly spread.
    gaps = [begin - end for (_, end), (begin, _) in itertools.pairwise(extents)][1:-1]
    assert not gaps or max(gaps) - min(gaps) <= 4096


def test_only_what_the_store_takes_is_discarded(block_devices: BlockDevices) -> None:
    """With a capacity, what lies behind the store keeps its bytes, at its creation and when it is wiped."""
    device = block_devices.blank("device")
    with open(device, "r+b", buffering=0) as raw:
        raw.seek(100_000_001)
        raw.write(b"outside")
    create = {"capacity": "1MiB", "erase_foreign_data": [device]}
    TensorStore.create(device, **create).close()
    TensorStore.create(device, overwrite=True, **create).close()
    TensorStore.wipe(device)
    with open(device, "rb") as raw:
        raw.seek(100_000_001)
        assert raw.read(7) == b"outside"


def refuse_then_erase(device: str, name: str) -> None:
    before = digest(device)
    for arguments in ({}, {"overwrite": True}, {"erase_foreign_data": ["/dev/other"]}):
        with pytest.raises(StoreError, match=rf"cannot create a store on '{device}': it holds {name}"):
            TensorStore.create(device, capacity="1MiB", **arguments)
    assert digest(device) == before
    with TensorStore.create(device, capacity="1MiB", erase_foreign_data=[device]) as store:
        store.put("w", np.arange(100))
        store.commit()
    with TensorStore.open(device) as store:
        assert store.get("w").tolist() == list(range(100))
    TensorStore.wipe(device)
    with open(device, "rb") as raw:
        head = raw.read(signatures.HEAD_BYTES)
    assert not any(head)


def test_block_devices_are_members_and_short_ones_are_refused(tmp_path: Path) -> None:
    with loop_device(tmp_path / "i1", 24 << 20) as one, loop_device(tmp_path / "i2", 24 << 20) as two:
        with pytest.raises(
            StoreError, match=rf"'{one}' has 25,165,824 bytes, the store needs .* device is too small"
        ):
            TensorStore.create([one, two], capacity="64MiB")
        values = np.arange(2 << 20, dtype=np.float32)
        with TensorStore.create([one, two], capacity="32MiB") as store:
            assert store.direct
            store.put("w", values)
            store.commit(b"on devices")
            with pytest.raises(StoreError, match=r"\[EBUSY\]"):
                TensorStore.open([one, two])
        with TensorStore.open([two, one]) as store:
            assert store.run_state == b"on devices"
            np.testing.assert_array_equal(store.get("w"), values)
            assert store.verify().ok


def test_blocks_smaller_than_the_sector_are_refused(tmp_path: Path) -> None:
    with loop_device(tmp_path / "image", 16 << 20, sector=4096) as device:
        with pytest.raises(StoreError, match=r"has sectors of 4,096 bytes, the store's blocks are 512"):
            TensorStore.create(device, capacity="1MiB", block_bytes=512)
        TensorStore.create(device, capacity="1MiB", block_bytes=4096).close()


def test_wipe_of_some_members_of_a_store_is_refused_unless_asked_for(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    TensorStore.create(paths, capacity="1MiB", **ANY_DISK).close()
    before = [digest(path) for path in paths]
    with pytest.raises(
        StoreError,
        match=r"b': its store has 3 members, 1 of them given.*missing: member 0, 2; .*--incomplete",
    ):
        TensorStore.wipe(paths[1])
    # Another store beside it changes nothing: nothing is removed of either.
    TensorStore.create(tmp_path / "other", capacity="1MiB", **ANY_DISK).close()
    with pytest.raises(StoreError, match=r"a': its store has 3 members, 2 of them given"):
        TensorStore.wipe([tmp_path / "other", *paths[:2]])
    assert (tmp_path / "other").exists()
    assert [digest(path) for path in paths] == before
    paths[2].unlink()
    with pytest.raises(StoreError, match=r"c': no such file"):
        TensorStore.wipe(paths)
    assert TensorStore.wipe(paths, incomplete=True) == [str(path) for path in paths[:2]]
    with pytest.raises(StoreError, match=r"a': no such file"):
        TensorStore.wipe(paths, incomplete=True)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_wipe_of_a_whole_store_does_not_mind_a_damaged_member(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    TensorStore.create(paths, capacity="1MiB", **ANY_DISK).close()
    with paths[1].open("r+b") as file:
        for offset in (100, (64 << 10) + 100):
            file.seek(offset)
            file.write(bytes(100))
    assert TensorStore.wipe(paths) == [str(path) for path in paths]


def killed_at(patched: tuple[object, str], create: Callable[[], object]) -> None:
    """Runs ``create`` in a child process that is killed where it calls the attribute ``patched`` names."""
    child = os.fork()
    if child == 0:
        try:
            setattr(*patched, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
            create()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)


@pytest.mark.parametrize("kind", ["file", "device", "device and file"])
def test_create_killed_before_its_first_write_is_told(
    tmp_path: Path, kind: str, block_devices: BlockDevices
) -> None:
    paths = block_devices.paths(kind, tmp_path)
    killed_at((formatting, "Volume"), lambda: TensorStore.create(paths, capacity="1MiB", **ANY_DISK))
    for given in (paths, paths[::-1]):
        for attempt in (TensorStore.open, TensorStore.wipe):
            with pytest.raises(
                StoreError, match=r"it (is empty|holds nothing but zeros .*): the creation .* was interrupted"
            ):
                attempt(given)
    TensorStore.create(paths, capacity="1MiB", **ANY_DISK).close()
    TensorStore.open(paths, **ANY_DISK).close()


def test_file_of_zeros_is_no_store_and_may_be_an_interrupted_one(tmp_path: Path) -> None:
    path = tmp_path / "s"
    for nbytes in (1, 4097, 5 << 20, 3 << 30):
        with path.open("wb") as file:
            file.truncate(nbytes)
        with pytest.raises(
            StoreError, match=r"holds nothing but zeros .* interrupted before its first write"
        ):
            TensorStore.open(path, **ANY_DISK)
        with path.open("r+b") as file:
            file.seek(nbytes - 1)
            file.write(b"\1")
        with pytest.raises(StoreError, match="not a memascend store; check the path"):
            TensorStore.open(path, **ANY_DISK)


@pytest.mark.parametrize("before", ["foreign data", "a store"])
@pytest.mark.parametrize("where", ["discard", "zero"])
def test_create_killed_while_it_erases_can_be_repeated(
    tmp_path: Path, block_devices: BlockDevices, before: str, where: str
) -> None:
    path = block_devices.blank("device") if where == "discard" else str(tmp_path / "s")
    if before == "a store":
        with TensorStore.create(path, capacity="4MiB", **ANY_DISK) as store:
            store.put("w", np.ones(1000))
            store.commit()
    else:
        with open(path, "r+b" if where == "discard" else "w+b") as raw:
            raw.write(b"foreign" * 100_000)
    allow = {"overwrite": True, "erase_foreign_data": True}
    killed_at((filesystem, where), lambda: TensorStore.create(path, capacity="4MiB", **allow, **ANY_DISK))
    with pytest.raises(StoreError, match="its creation was interrupted and it holds nothing"):
        TensorStore.open(path, **ANY_DISK)
    # Nothing is there that would need a word to be replaced.
    TensorStore.create(path, capacity="4MiB", **ANY_DISK).close()
    TensorStore.wipe(path)


def test_read_only_device_is_named_before_anything_is_written(tmp_path: Path) -> None:
    with loop_device(tmp_path / "image", 16 << 20) as device:
        for contents in ("nothing", "a store"):
            if contents == "a store":
                TensorStore.create(device, capacity="1MiB").close()
            before = digest(device)
            subprocess.run(["blockdev", "--setro", device], check=True)
            try:
                for attempt in (
                    lambda: TensorStore.create(
                        [tmp_path / "a", device], capacity="1MiB", overwrite=True, **ANY_DISK
                    ),
                    lambda: TensorStore.open(device),
                    lambda: TensorStore.wipe(device),
                ):
                    with pytest.raises(
                        StoreIOError,
                        match=rf"'{device}' for writing: the device is read-only .*blockdev --setrw",
                    ) as caught:
                        attempt()
                    assert caught.value.errno == errno.EROFS
                if contents == "a store":
                    TensorStore.open(device, read_only=True).close()
            finally:
                subprocess.run(["blockdev", "--setrw", device], check=True)
            assert digest(device) == before
            assert [path.name for path in tmp_path.iterdir()] == ["image"]


def test_more_members_than_a_store_can_have_are_counted(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="a store has 1 to 16 members, got 17; give fewer paths"):
        TensorStore.create([tmp_path / str(index) for index in range(17)], capacity="1MiB", **ANY_DISK)
    assert not list(tmp_path.iterdir())
