#!/bin/sh
# `train ...` and `predict ...` are train.py and predict.py; anything else is a command of its own.
case "${1:-}" in
train | predict)
    script=$(dirname "$0")/../$1.py
    shift
    exec python "$script" "$@"
    ;;
*) exec "$@" ;;
esac
