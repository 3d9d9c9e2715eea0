#!/bin/sh
# Builds the core for 64-bit ARM with a cross compiler, and runs tests of it in an emulator: they show that the kernels
# are right, never how fast they are. Arguments go to pytest.
#
# Needs Debian's packages g++-aarch64-linux-gnu and qemu-user-static. Python for ARM is unpacked from Debian's packages
# into build/aarch64/root and wheels into build/aarch64/site; nothing is installed in the system. QEMU_CPU names the
# processor: cortex-a72 lacks the dot products that max has.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
folder=$PWD/build/aarch64
root=$folder/root
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')

for tool in aarch64-linux-gnu-g++ qemu-aarch64-static apt-get; do
  command -v "$tool" >/dev/null && continue
  echo "aarch64: $tool is not installed. On Debian: apt-get install g++-aarch64-linux-gnu qemu-user-static" >&2
  exit 1
done

# With apt's own files in our folder: the system's packages and its architectures stay as they are.
unpack_python() {
  apt=$folder/apt
  mkdir -p "$apt/state/lists/partial" "$apt/cache/archives/partial" "$root"
  set -- -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User= -o Debug::NoLocking=1 \
    -o "Dir::State=$apt/state" -o Dir::State::status=/dev/null -o "Dir::Cache=$apt/cache"
  apt-get "$@" update
  apt-get "$@" install --yes --download-only --no-install-recommends python3 libpython3-dev libstdc++6
  for package in "$apt"/cache/archives/*.deb; do dpkg -x "$package" "$root"; done
  touch "$folder/root.done"
}
[ -e "$folder/root.done" ] || unpack_python
if [ ! -e "$root/usr/bin/python$version" ]; then
  echo "aarch64: Debian has no Python $version for ARM, only $(cd "$root/usr/bin" && echo python3.*). Make .venv with that" \
    "version (PYTHON=python3.11 make clean test-aarch64)." >&2
  exit 1
fi

unpack_wheels() {
  platforms="--platform manylinux2014_aarch64"
  for glibc in 24 26 27 28 31 34 35; do platforms="$platforms --platform manylinux_2_${glibc}_aarch64"; done
  # shellcheck disable=SC2086 # several options
  "$python" -m pip install --quiet --disable-pip-version-check --target "$folder/site" $platforms --only-binary=:all: \
    --python-version "$version" --implementation cp --abi "cp$(echo "$version" | tr -d .)" --abi abi3 --abi none \
    numpy msgspec pytest pytest-timeout hypothesis
  touch "$folder/site.done"
}
[ -e "$folder/site.done" ] || unpack_wheels

build_core() {
  bin=$(dirname "$python")
  if [ ! -e "$folder/core/build.ninja" ]; then
    "$bin/cmake" -S . -B "$folder/core" -G Ninja "-DCMAKE_MAKE_PROGRAM=$(command -v "$bin/ninja")" \
      -DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
      -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ "-DCMAKE_CXX_FLAGS=-idirafter $root/usr/include" \
      "-DPython_EXECUTABLE=$(command -v "$python")" "-DPython_INCLUDE_DIR=$root/usr/include/python$version" \
      "-DSKBUILD_SOABI=cpython-$(echo "$version" | tr -d .)-aarch64-linux-gnu" >"$folder/cmake.log" ||
      { cat "$folder/cmake.log" >&2 && exit 1; }
  fi
  "$bin/ninja" -C "$folder/core" _core
  rm -rf "$folder/package"
  mkdir "$folder/package"
  cp -rs "$PWD/src/headrace" "$folder/package"
  rm -f "$folder"/package/headrace/_core.*.so
  cp "$folder"/core/_core.*.so "$folder/package/headrace"
}
build_core

# Programs that a test starts with sys.executable run in the emulator too: that is this script's name, by -0.
cat >"$folder/python" <<END
#!/bin/sh
export PYTHONHOME="$root/usr" PYTHONPATH="$folder/package:$folder/site:$PWD" QEMU_LD_PREFIX="$root"
exec qemu-aarch64-static -0 "$folder/python" "$root/usr/bin/python$version" "\$@"
END
chmod 755 "$folder/python"

# No conftest.py, whose imports need all that Headrace needs; test_fp8.py compares with torch.
[ $# -gt 0 ] || set -- tests/core --ignore=tests/core/test_fp8.py
export QEMU_CPU="${QEMU_CPU:-max}"
exec "$folder/python" -m pytest --noconftest -p no:cacheprovider "$@"
