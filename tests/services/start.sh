#!/usr/bin/env bash
# Real parts for tests/services: Kafka, YARN, Postgres, the jars of Spark's sinks, and Iceberg's with its Spark.
# usage: start.sh FOLDER    start what is not running (the first time Maven fetches the jars, some minutes)
#        start.sh FOLDER stop
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
mkdir -p "$1"
home="$(cd "$1" && pwd)"
postgres="$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | tail -n 1 || true)"
cluster="/tmp/gpu-join-postgres-$(id -u)" # its owner has to reach it
as_postgres() { if [ "$(id -u)" = 0 ]; then su postgres -s /bin/bash -c "$*"; else bash -c "$*"; fi; }
running() { [ -f "$1" ] && kill -0 "$(head -n 1 "$1")" 2>/dev/null; }

if [ "${2:-}" = stop ]; then
  for what in kafka yarn; do
    if running "$home/$what/pid"; then kill "$(cat "$home/$what/pid")"; fi
  done
  if [ -n "$postgres" ] && running "$cluster/data/postmaster.pid"; then
    as_postgres "$postgres/pg_ctl -D $cluster/data -m fast stop >/dev/null"
  fi
  exit 0
fi

for what in spark:jars kafka:kafka/lib yarn:yarn/lib iceberg:iceberg; do
  folder="$home/${what#*:}"
  if ! cmp -s "$here/${what%:*}.xml" "$folder/.complete"; then
    if mvn -q -B -f "$here/${what%:*}.xml" dependency:copy-dependencies -DoutputDirectory="$folder"; then
      cp "$here/${what%:*}.xml" "$folder/.complete"
    else
      echo "SKIPPED: the jars of ${what%:*}.xml cannot be fetched, so neither can what needs them be tested" >&2
    fi
  fi
done

# the newest Spark that Iceberg has a jar for: it refuses to load into a newer one
if [ -f "$home/iceberg/.complete" ] && [ ! -f "$home/spark-4.1/.complete" ]; then
  if python3 -m pip install -q --target "$home/spark-4.1" pyspark==4.1.4; then
    touch "$home/spark-4.1/.complete"
  else
    echo "SKIPPED: PySpark 4.1 cannot be fetched, so Iceberg's jar cannot be tested" >&2
  fi
fi

if [ ! -f "$home/kafka/lib/.complete" ]; then
  :
elif ! running "$home/kafka/pid"; then
  if (: > /dev/tcp/localhost/19092) 2>/dev/null; then
    echo "port 19092 is in use, by the Kafka of another checkout perhaps: its start.sh FOLDER stop" >&2
    exit 1
  fi
  kafka=(java -Xmx512m -Dorg.slf4j.simpleLogger.defaultLogLevel=warn -cp "$home/kafka/lib/*")
  cat > "$home/kafka/server.properties" <<END
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@localhost:19093
listeners=PLAINTEXT://localhost:19092,CONTROLLER://localhost:19093
advertised.listeners=PLAINTEXT://localhost:19092
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs=$home/kafka/data
num.partitions=2
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
END
  if [ ! -d "$home/kafka/data" ]; then
    id="$("${kafka[@]}" kafka.tools.StorageTool random-uuid 2>/dev/null | tail -n 1)"
    "${kafka[@]}" kafka.tools.StorageTool format -t "$id" -c "$home/kafka/server.properties" >/dev/null
  fi
  nohup "${kafka[@]}" kafka.Kafka "$home/kafka/server.properties" > "$home/kafka/log" 2>&1 &
  echo $! > "$home/kafka/pid"
  for _ in $(seq 60); do
    if (: > /dev/tcp/localhost/19092) 2>/dev/null; then break; fi
    running "$home/kafka/pid" || { tail -n 20 "$home/kafka/log"; exit 1; }
    sleep 1
  done
fi

if [ -f "$home/yarn/lib/.complete" ] && ! running "$home/yarn/pid"; then
  rm -rf "$home/yarn/conf" "$home/yarn/work"
  mkdir -p "$home/yarn/conf" "$home/yarn/work"
  (cd "$home/yarn/work" && exec nohup java -Xmx700m --add-opens java.base/java.lang=ALL-UNNAMED -cp "$home/yarn/lib/*" \
    "$here/Yarn.java" "$home/yarn/conf" > "$home/yarn/log" 2>&1) &
  echo $! > "$home/yarn/pid"
  for _ in $(seq 90); do
    if [ -s "$home/yarn/conf/yarn-site.xml" ]; then break; fi
    running "$home/yarn/pid" || { tail -n 20 "$home/yarn/log"; exit 1; }
    sleep 1
  done
fi

if [ -z "$postgres" ]; then
  echo "SKIPPED: no Postgres here (apt-get install postgresql), so its tests" >&2
elif ! running "$cluster/data/postmaster.pid"; then
  mkdir -p "$cluster"
  if [ "$(id -u)" = 0 ]; then chown postgres "$cluster"; fi
  [ -d "$cluster/data" ] || as_postgres "$postgres/initdb -D $cluster/data -A trust >/dev/null"
  as_postgres "$postgres/pg_ctl -D $cluster/data -o '-p 15432 -k /tmp' -l $cluster/log -w start >/dev/null"
fi
