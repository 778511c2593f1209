#!/bin/sh
# keep_report.sh FOLDER COMPILER ARGUMENT...: runs the compiler and keeps what ptxas says of each kernel (registers,
# spills, shared memory) in FOLDER/SOURCE.txt, so that it is there after a build that had nothing left to compile.
folder=$1
shift
for object; do :; done  # CMake names the object last
report=$folder/$(basename "$object" .cu.o).txt
mkdir -p "$folder"
"$@" 2>"$report.part"
status=$?
grep -v -e '^ptxas info' -e '^    [0-9]* bytes stack frame' "$report.part" >&2
mv "$report.part" "$report"
exit $status
