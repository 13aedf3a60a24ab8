# No code of an instruction set may leave its file: a weak symbol (an inline function, a template) could be the
# copy that the linker takes for the whole program, which then dies on a CPU without that instruction set.
# Compiled without optimisation, where nothing is inlined away.
# cmake -DCOMPILER= -DNM= -DSOURCE= -DOWN_NAMESPACE= -DFLAGS= -DINCLUDES= -DWORK_DIR= -P isa_isolation.cmake
cmake_path(GET SOURCE FILENAME name)
file(MAKE_DIRECTORY ${WORK_DIR})
list(TRANSFORM INCLUDES PREPEND -I)
execute_process(COMMAND ${COMPILER} -std=c++20 -O0 ${FLAGS} ${INCLUDES} -c ${SOURCE} -o ${WORK_DIR}/${name}.o
  COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${NM} --demangle --defined-only ${WORK_DIR}/${name}.o OUTPUT_VARIABLE symbols
  COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE ";" "," symbols "${symbols}")
string(REGEX MATCHALL "[^\n]+" symbols "${symbols}")
list(LENGTH symbols num_symbols)
if(num_symbols EQUAL 0)
  message(FATAL_ERROR "${name} defines no symbol at all: nothing was checked")
endif()
list(FILTER symbols INCLUDE REGEX "^[0-9a-f]+ [WVu] ")
list(FILTER symbols EXCLUDE REGEX "^[0-9a-f]+ [WVu] (.*${OWN_NAMESPACE}::|DW\\.ref\\.)")  # DW.ref: a pointer
if(symbols)
  list(JOIN symbols "\n" leaks)
  message(FATAL_ERROR "${name} leaks:\n${leaks}")
endif()
