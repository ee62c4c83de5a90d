#!/bin/sh
# `train ...`, `predict ...` and `studio ...` are the installed commands; anything else is a command of its own.
name=${1:-}
case "$name" in
train | predict)
    shift
    exec "retouch-$name" "$@"
    ;;
studio)
    shift
    exec retouch-studio host=0.0.0.0 open=false "$@"
    ;;
*) exec "$@" ;;
esac
