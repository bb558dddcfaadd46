#!/bin/sh
# The demo: two daemons, a real trace, and two deployments that are refused.
# Run it with `make demo`; it needs bin/tierd and refused/short-tail.wasm.
#
# REQUESTS=N plays N requests instead of 300.
#
# It writes only into a directory of its own under .build, takes free ports, ends only
# the processes that it started, and may run several times at once.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
demo=examples/demo
tierd=bin/tierd
trace=examples/traces/conversation_trace_1000.jsonl
requests=${REQUESTS:-300}
# How long a daemon may take from start to ready, in seconds, when it must run the check.
ready_within=90

# What the two slabs and the four regions need, in KiB.
shared_kib=3000000

mkdir -p .build
run=$(mktemp -d "$root/.build/demo.XXXXXX")
sockets=$(mktemp -d /tmp/tierd-demo.XXXXXX) # the path of a Unix socket has at most 107 bytes
producer_pid= consumer_pid= job_pid= shared=

stop() { # stop PID: ask the process to end, and wait for it
	[ -n "$1" ] || return 0
	kill -TERM "$1" 2>/dev/null || :
	wait "$1"
}

# A job is in the background, because a shell runs its traps between two commands, and
# `wait` is the only long one that a signal ends.
job() { # job COMMAND...: run it, and return its status
	"$@" &
	job_pid=$!
	job_status=0
	wait "$job_pid" || job_status=$?
	job_pid=
	return "$job_status"
}

finish() {
	status=$?
	trap - EXIT INT TERM
	stop "$job_pid" 2>/dev/null || :
	stop "$consumer_pid" 2>/dev/null || :
	stop "$producer_pid" 2>/dev/null || :
	if [ "$status" -eq 130 ] || [ "$status" -eq 143 ]; then
		echo
		echo "the demo was stopped"
		rm -rf "$run"
	elif [ "$status" -ne 0 ]; then
		for side in producer consumer; do
			[ -s "$run/$side.log" ] || continue
			echo
			echo "--- the end of the $side's log"
			tail -n 25 "$run/$side.log"
		done
		echo
		echo "the demo failed (status $status); its files are in $run"
	else
		rm -rf "$run"
	fi
	rm -rf "$sockets" ${shared:+"$shared"}
	exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

say() {
	echo
	echo "== $*"
}

write_configs() {
	free_kib=$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 { print $4 }')
	if [ "${free_kib:-0}" -ge "$shared_kib" ]; then
		shared=$(mktemp -d /dev/shm/tierd-demo.XXXXXX)
	else
		shared=$run/shared
		mkdir "$shared"
		echo "using $shared, because /dev/shm has ${free_kib:-0} KiB free and the demo needs $shared_kib"
	fi
	ports=$(go run "$demo/freeports.go" 2)
	# shellcheck disable=SC2086 # two words
	set -- $ports
	for side in producer consumer; do
		sed -e "s#@RUN@/$side.sock#$sockets/$side.sock#" -e "s#@RUN@#$run#" -e "s#@DEMO@#$root/$demo#" \
			-e "s#@SLAB_DIR@#$shared#" \
			-e "s#@PRODUCER_PORT@#$1#" -e "s#@CONSUMER_PORT@#$2#" "$demo/$side.yaml" >"$run/$side.yaml"
	done
}

wait_ready() { # wait_ready SIDE PID: until addresses.json is there, which is written last
	i=0
	while [ ! -e "$run/$1/addresses.json" ]; do
		if ! kill -0 "$2" 2>/dev/null; then
			echo "the $1's daemon ended before it was ready"
			return 1
		fi
		i=$((i + 1))
		if [ "$i" -gt $((ready_within * 10)) ]; then
			echo "the $1's daemon was not ready after $ready_within s"
			return 1
		fi
		sleep 0.1
	done
}

wait_session() { # wait_session SIDE: until the node has a session with its peer
	i=0
	until grep -q 'msg="peer session up"' "$run/$1.log"; do
		i=$((i + 1))
		if [ "$i" -gt 100 ]; then
			echo "the $1 has no session with its peer after 10 s"
			return 1
		fi
		sleep 0.1
	done
}

replay() { # replay LEG
	say "tierd replay --trace $trace --requests $requests --leg $1"
	job "$tierd" replay --trace "$trace" --requests "$requests" --leg "$1" \
		--producer "$sockets/producer.sock" --consumer "$sockets/consumer.sock"
}

refused() { # refused FILE RELATION
	say "tierd check $1"
	status=0
	job "$tierd" check "$1" >"$run/refused.txt" || status=$?
	cat "$run/refused.txt"
	if [ "$status" -ne 1 ] || ! grep -q "relation $2" "$run/refused.txt"; then
		echo "this must be refused with status 1 by relation $2, but the status is $status"
		return 1
	fi
}

say "tierd check $demo/deployment.yaml"
job "$tierd" check --state "$run/producer" "$demo/deployment.yaml"
cp -R "$run/producer" "$run/consumer" # the verdict is kept by digest: both daemons start with it

say "tierd serve: a producer and a consumer"
write_configs
"$tierd" serve -c "$run/producer.yaml" >"$run/producer.log" 2>&1 &
producer_pid=$!
"$tierd" serve -c "$run/consumer.yaml" >"$run/consumer.log" 2>&1 &
consumer_pid=$!
wait_ready producer "$producer_pid"
wait_ready consumer "$consumer_pid"
wait_session producer
wait_session consumer
echo "producer: process $producer_pid, consumer: process $consumer_pid"

replay pd
replay probe

say "both daemons stop on SIGTERM"
pid=$consumer_pid consumer_pid=
stop "$pid"
pid=$producer_pid producer_pid=
stop "$pid"
echo "both ended with status 0"
if [ -n "$(ls -A "$shared")" ]; then
	echo "a daemon left shared memory behind:"
	ls -lR "$shared"
	exit 1
fi

refused $demo/refused/chunk-level-producer.yaml warm
refused $demo/refused/short-tail.yaml covers

say "done: every byte was right, no demand was left unmatched, and two wrong deployments were refused"
