# Installs the build into an empty prefix and uses it as strangers would: find_package and pkg-config.
# cmake -DBUILD_DIR= -DSOURCE_DIR= -DWORK_DIR= -DCOMPILER= -DFLAGS= -P run.cmake
file(REMOVE_RECURSE ${WORK_DIR})
function(must)
  execute_process(COMMAND ${ARGN} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

must(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${WORK_DIR}/prefix)
must(${CMAKE_COMMAND} -S ${SOURCE_DIR}/tests/install/find_package -B ${WORK_DIR}/find_package
  -DCMAKE_PREFIX_PATH=${WORK_DIR}/prefix -DMOE4_SOURCE_DIR=${SOURCE_DIR} -DCMAKE_CXX_COMPILER=${COMPILER}
  -DCMAKE_CXX_FLAGS=${FLAGS} -DCMAKE_BUILD_TYPE=Release)
must(${CMAKE_COMMAND} --build ${WORK_DIR}/find_package)
must(${WORK_DIR}/find_package/run_one_layer ${SOURCE_DIR}/samples/tiny-modelopt)

find_program(pkg_config NAMES pkg-config pkgconf)
if(NOT pkg_config)
  message(STATUS "pkg-config is not installed: moe4.pc was not tried")
  return()
endif()
file(GLOB_RECURSE pc ${WORK_DIR}/prefix/moe4.pc)
cmake_path(GET pc PARENT_PATH folder)
set(ENV{PKG_CONFIG_PATH} ${folder})
execute_process(COMMAND ${pkg_config} --cflags --libs --static moe4 OUTPUT_VARIABLE flags COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags} ${FLAGS}")
must(${COMPILER} -std=c++20 ${SOURCE_DIR}/examples/run_one_layer.cpp ${flags} -o ${WORK_DIR}/with_pkg_config)
must(${WORK_DIR}/with_pkg_config ${SOURCE_DIR}/samples/tiny-modelopt)
