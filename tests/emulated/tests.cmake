# The kernels of AVX-512 and AMX once more, under names of their own, on instructions in plain C++: this folder's
# immintrin.h comes before the compiler's.
if(NOT TARGET moe4_cpu_avx512)
  return()
endif()
set(kernels avx512 avx512_bf16 avx512_layout avx512_vnni)
list(TRANSFORM kernels PREPEND ${PROJECT_SOURCE_DIR}/src/backends/cpu/kernels/)
list(TRANSFORM kernels APPEND .cpp)
moe4_test(emulated unit ${CMAKE_CURRENT_LIST_DIR}/kernels_test.cpp ${CMAKE_CURRENT_LIST_DIR}/intrinsics_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/intrinsics.cpp ${kernels})
target_include_directories(moe4_emulated_test BEFORE PRIVATE ${CMAKE_CURRENT_LIST_DIR})
target_compile_definitions(moe4_emulated_test PRIVATE amx=emulated_amx avx512=emulated_avx512
  avx512_bf16=emulated_avx512_bf16 avx512_vnni=emulated_avx512_vnni kPackedLayout=kEmulatedPackedLayout
  MOE4_INTRINSICS=emulations)
# How a 64-byte struct is passed is our own affair. Unrolled loops over emulated registers take compilers minutes to
# optimise, above all with a sanitizer.
target_compile_options(moe4_emulated_test PRIVATE -Wno-psabi -O1 -g0 -fno-sanitize-address-use-after-scope)

add_library(moe4_instructions OBJECT ${CMAKE_CURRENT_LIST_DIR}/intrinsics.cpp)
target_link_libraries(moe4_instructions PRIVATE moe4_options)
target_include_directories(moe4_instructions PRIVATE ${PROJECT_SOURCE_DIR}/src ${CMAKE_CURRENT_SOURCE_DIR})
target_compile_definitions(moe4_instructions PRIVATE MOE4_INTRINSICS=instructions)
target_compile_options(moe4_instructions PRIVATE -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vbmi -mavx512vnni
  -mavx512bf16 $<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized> $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
target_sources(moe4_emulated_test PRIVATE $<TARGET_OBJECTS:moe4_instructions>)
