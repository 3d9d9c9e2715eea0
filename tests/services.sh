#!/bin/sh
# Installs the services that tests start by themselves on free ports: redis-server and postgres, from Debian's packages;
# promtool, which checks the rules that we generate,
# the browser that tests open the pages in, and the clients that they run with node, among them two coding agents. Nothing
# is left running. Where they cannot be had, the tests that need them are skipped, and say so.
set -eu
clients=$(dirname "$0")/conformance
missing=""
command -v redis-server >/dev/null || missing="redis-server"
command -v postgres >/dev/null || ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || missing="$missing postgresql"
command -v promtool >/dev/null || missing="$missing prometheus"
command -v node >/dev/null || missing="$missing nodejs"
command -v npm >/dev/null || missing="$missing npm"
command -v chromium >/dev/null || missing="$missing chromium"

install_packages() {
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "services: not installed: $missing (this needs root and apt-get)"
    return
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
}

[ -z "$missing" ] || install_packages
if ! command -v npm >/dev/null; then
  echo "services: not installed: clients for node (this needs node and npm)"
elif [ ! "$clients/node_modules/.package-lock.json" -nt "$clients/package-lock.json" ]; then
  npm ci --prefix "$clients" --ignore-scripts --no-audit --no-fund --loglevel=error >/dev/null ||
    echo "services: could not be installed: clients for node"
fi
