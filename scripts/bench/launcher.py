"""Starts the SGLang server in this very process and lets it prove what it is.

    python -P scripts/bench/launcher.py [--nonce N] [--baseline-cache DIR]
        [--cache DIR] [--stop-with-stdin] -- SERVER ARGUMENTS

The process that serves requests hashes the `sglang` package it imported itself
and answers GET /bench_identity with it. The same text goes to standard output
once, for nodes that have no HTTP server.
"""

import argparse
import json
import os
import platform
import runpy
import shutil
import socket
import sys
import threading
import time
from pathlib import Path

MARK = "BENCH-IDENTITY "
PACKAGES = (
    "sglang",
    "sglang-kernel",
    "flashinfer-python",
    "torch",
    "triton",
    "transformers",
    "nvidia-cutlass-dsl",
    "nvidia-cublas",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-frontend",
)


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Splits our own options from the server's, at the first `--`."""
    if "--" not in argv:
        sys.exit("launcher.py: put `--` before the server arguments")
    cut = argv.index("--")
    parser = argparse.ArgumentParser(prog="launcher.py", description=__doc__)
    parser.add_argument("--nonce", default="", help="named back in the identity")
    parser.add_argument("--baseline-cache", default="", help="cache to clone")
    parser.add_argument("--cache", default="", help="where the clone goes")
    parser.add_argument("--stop-with-stdin", action="store_true")
    return parser.parse_args(argv[:cut]), argv[cut + 1 :]


def clone_cache(baseline: str, target: str) -> dict:
    """Copies the baseline's autotune cache to a folder that must not exist yet.

    Sets SGLANG_CACHE_DIR, under which SGLang keeps FlashInfer's tuned tactics.
    Returns the digest and file count of the copy before anything used it.
    """
    from bench.digest import folder_digest

    if Path(target).exists():
        sys.exit(f"launcher.py: cache {target} exists already; a run needs a fresh one")
    if baseline:
        if not Path(baseline).is_dir():
            sys.exit(
                f"launcher.py: no baseline cache at {baseline}; make it with"
                " `python scripts/bench serve-ab CONFIG --prepare-cache`"
            )
        shutil.copytree(baseline, target)
    else:
        Path(target).mkdir(parents=True)
    os.environ["SGLANG_CACHE_DIR"] = target
    digest, files = folder_digest(Path(target))
    return {"path": target, "digest": digest, "files": files}


def end_with_stdin(cache: str) -> None:
    """Ends this process, its children and its cache once standard input closes."""
    import psutil

    def watch() -> None:
        while os.read(0, 4096):
            pass
        children = psutil.Process().children(recursive=True)
        for child in children:
            try:
                child.terminate()
            except psutil.NoSuchProcess:
                pass
        _, alive = psutil.wait_procs(children, timeout=10)
        for child in alive:
            child.kill()
        if cache:
            shutil.rmtree(cache, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=watch, name="bench-stdin", daemon=True).start()


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that decide speed; absent ones left out."""
    from importlib import metadata

    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def gpu_state() -> tuple[list[dict], str]:
    """Name, clocks (MHz), power limit (W), temperature (C) of each GPU, and driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no NVML library, or no driver: a machine without a GPU
        return [], ""

    def ask(function, *arguments):
        try:
            return function(*arguments)
        except pynvml.NVMLError:
            return None

    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        power = ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, gpu)
        sm, memory = pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM
        gpus.append(
            {
                "index": index,
                "name": ask(pynvml.nvmlDeviceGetName, gpu) or "unknown",
                "sm_clock_mhz": ask(pynvml.nvmlDeviceGetClockInfo, gpu, sm),
                "sm_clock_max_mhz": ask(pynvml.nvmlDeviceGetMaxClockInfo, gpu, sm),
                "memory_clock_mhz": ask(pynvml.nvmlDeviceGetClockInfo, gpu, memory),
                "power_limit_w": power / 1000 if power is not None else None,
                "temperature_c": ask(
                    pynvml.nvmlDeviceGetTemperature, gpu, pynvml.NVML_TEMPERATURE_GPU
                ),
            }
        )
    driver = ask(pynvml.nvmlSystemGetDriverVersion) or ""
    pynvml.nvmlShutdown()
    return gpus, driver


def identity(nonce: str, cache: dict | None) -> dict:
    """What this process is: the digest of the sglang package it imported, and more."""
    from bench.digest import folder_digest

    import sglang

    tree = Path(sglang.__file__).resolve().parent
    digest, files = folder_digest(tree)
    return {
        "nonce": nonce,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "tree": str(tree),
        "digest": digest,
        "files": files,
        "python": platform.python_version(),
        "packages": package_versions(),
        "cache": cache,
        "started": time.time(),
    }


def main(argv: list[str]) -> None:
    """Identifies this process, adds the identity route, then runs SGLang's own main."""
    options, arguments = parse(argv)
    scripts = str(Path(__file__).resolve().parent.parent)
    sys.path.append(scripts)
    if options.stop_with_stdin:
        end_with_stdin(options.cache)
    cache = None
    if options.cache:
        cache = clone_cache(options.baseline_cache, options.cache)
    me = identity(options.nonce, cache)
    print(MARK + json.dumps(me), flush=True)
    sys.path.remove(scripts)

    from sglang.srt.entrypoints.http_server import app

    @app.get("/bench_identity")
    def bench_identity() -> dict:
        gpus, driver = gpu_state()
        return {**me, "gpus": gpus, "driver": driver}

    sys.argv = ["sglang.launch_server", *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
