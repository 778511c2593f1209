#!/bin/sh
# keep_report.sh FOLDER COMPILER ARGUMENT...: runs the compiler and keeps ptxas's report on each kernel (registers,
# spills, shared memory) in FOLDER/SOURCE.txt, so that a build with nothing to compile has the report too.
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
