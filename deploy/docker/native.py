"""Compiles our C++ beside the installed code, so that an image needs no compiler: `python deploy/docker/native.py`."""

from kvstore import hash_chain
from model_runner.native import build
from moontide.native_build import ship_library

if __name__ == "__main__":
    print(ship_library(hash_chain.SOURCE))
    print(ship_library(build.SOURCE, flags=build.FLAGS))
