#!/bin/sh
# Installs the services that tests start by themselves on free ports: redis-server and postgres, from Debian's packages.
# Nothing is left running. Where they cannot be had, the tests that need them are skipped, and say so.
set -eu
missing=""
command -v redis-server >/dev/null || missing="redis-server"
command -v postgres >/dev/null || ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || missing="$missing postgresql"
if [ -z "$missing" ]; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "services: not installed: $missing (this needs root and apt-get)"
  exit 0
fi
policy=/usr/sbin/policy-rc.d # keeps a package from starting what it installs
made=""
if [ ! -e "$policy" ]; then
  made="$policy"
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"
fi
trap '[ -z "$made" ] || rm -f "$made"' EXIT
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086 # several packages
if ! { apt-get -qq update && apt-get -qq install --yes --no-install-recommends $missing >/dev/null; }; then
  echo "services: could not be installed: $missing"
fi
