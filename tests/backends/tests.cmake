moe4_test(allocations unit ${CMAKE_CURRENT_LIST_DIR}/allocations.cpp)
