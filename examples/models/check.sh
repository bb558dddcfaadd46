#!/bin/sh
# Judges every model of this directory over its whole length (Llama 4 Scout: to 131,072), in
# blocks of 16 and chunks of 128 tokens, in legs pd and probe, with a draft head and without, and
# says how long each took. One of them takes up to a few minutes of two cores.
#
#   TIERD=path/to/tierd DRAFT="--draft" sh check.sh [MODEL...]
set -eu
cd "$(dirname "$0")"
tierd=${TIERD:-tierd}
drafts=${DRAFT:-"--draft=false --draft=true"}
[ $# -gt 0 ] || set -- *.json

status=0
for file in "$@"; do
	most=
	case $file in
	llama-4-scout.json) most=--max-tokens=131072 ;;
	t5-small.json | whisper-large-v3.json) # an encoder: nothing to judge
		said=$("$tierd" check --model "$file" --block 16 2>&1) && got=0 || got=$?
		case "$got $said" in
		"2 "*"not prefix-cacheable"*) echo "$file: not prefix-cacheable, as it should be" ;;
		*) echo "$file: status $got: $said"; status=1 ;;
		esac
		continue ;;
	esac
	for draft in $drafts; do
		begin=$(date +%s)
		if said=$("$tierd" check --model "$file" --block 16 --legs pd,probe $most "$draft" 2>&1); then
			word=accepted
		else
			word=REFUSED status=1
		fi
		echo "$file $draft: $word, $(($(date +%s) - begin)) s"
		[ "$word" = accepted ] || echo "$said"
	done
done
exit $status
