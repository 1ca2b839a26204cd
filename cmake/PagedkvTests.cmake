# ctest entries:
#   abi.NAME for each tests/abi/NAME.c and .cc, linked to the shared library, as a client is
#   unit.NAME for each tests/unit/NAME.cc, linked to the objects, so that they reach what is not exported;
#     cuda*.cc with CUDA only
set(strict_options -Wall -Wextra -pedantic -Werror)
# clang puts the sanitizers for C++ into programs of C++ alone, and the library needs them.
set(sanitized_c "")
if(PAGEDKV_SANITIZE AND CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  set(sanitized_c LINKER_LANGUAGE CXX)
endif()

file(GLOB abi_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/abi/*.c"
     "${PROJECT_SOURCE_DIR}/tests/abi/*.cc")
foreach(source IN LISTS abi_sources)
  get_filename_component(name "${source}" NAME_WE)
  add_executable(abi_${name} "${source}")
  target_compile_options(abi_${name} PRIVATE ${strict_options})
  target_link_libraries(abi_${name} PRIVATE pagedkv Threads::Threads m)
  set_target_properties(abi_${name} PROPERTIES C_EXTENSIONS OFF ${sanitized_c})
  add_test(NAME abi.${name} COMMAND abi_${name})
endforeach()

# A profiler for ranges.c, which loads it by its path.
add_library(fake_profiler MODULE "${PROJECT_SOURCE_DIR}/tests/abi/profiler/fake_profiler.c")
target_compile_options(fake_profiler PRIVATE ${strict_options})
set_target_properties(fake_profiler PROPERTIES PREFIX "" C_EXTENSIONS OFF ${sanitized_c})
add_dependencies(abi_ranges fake_profiler)
target_compile_definitions(abi_ranges PRIVATE "FAKE_PROFILER=\"$<TARGET_FILE:fake_profiler>\"")
target_link_libraries(abi_ranges PRIVATE ${CMAKE_DL_LIBS})

add_library(pagedkv_internal STATIC)
target_link_libraries(pagedkv_internal PUBLIC pagedkv_objects)
find_path(DOCTEST_INCLUDE_DIR doctest/doctest.h REQUIRED)
file(GLOB unit_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/unit/*.cc")
if(NOT PAGEDKV_HAVE_CUDA)
  list(FILTER unit_sources EXCLUDE REGEX "/cuda[^/]*$")
endif()
add_executable(unit_tests ${unit_sources})
target_compile_options(unit_tests PRIVATE -Wall -Wextra)
target_include_directories(unit_tests SYSTEM PRIVATE "${DOCTEST_INCLUDE_DIR}")
target_link_libraries(unit_tests PRIVATE pagedkv_internal)
foreach(source IN LISTS unit_sources)
  get_filename_component(name "${source}" NAME_WE)
  if(name STREQUAL "main")
    continue()
  endif()
  add_test(NAME unit.${name} COMMAND unit_tests "--source-file=*/${name}.cc")
  set_tests_properties(unit.${name} PROPERTIES FAIL_REGULAR_EXPRESSION "test cases: +0 ")  # a wrong file name
endforeach()
set_tests_properties(unit.host_attend PROPERTIES COST 100)  # by far the longest: started first, beside all others

# The host kernels and their tests alone: few enough to be built for another processor and run under an emulator.
set(host_sources ${sources} ${unit_sources})
list(FILTER host_sources INCLUDE REGEX
     "/libpagedkv/(base|backend|backend/host)/[^/]*\\.cc$|/tests/unit/(main|host_(attend|copy_merge|formats|write_kv))\\.cc$")
add_executable(host_tests EXCLUDE_FROM_ALL ${host_sources})
target_compile_definitions(host_tests PRIVATE $<TARGET_PROPERTY:pagedkv_objects,INTERFACE_COMPILE_DEFINITIONS>)
target_include_directories(host_tests PRIVATE
                           $<TARGET_PROPERTY:pagedkv_objects,INTERFACE_INCLUDE_DIRECTORIES>)
target_include_directories(host_tests SYSTEM PRIVATE "${DOCTEST_INCLUDE_DIR}")
target_link_libraries(host_tests PRIVATE Threads::Threads ${CMAKE_DL_LIBS})

# Made on demand only.
add_executable(benchmark_host_kernels EXCLUDE_FROM_ALL "${PROJECT_SOURCE_DIR}/benchmarks/host_kernels.cc")
target_link_libraries(benchmark_host_kernels PRIVATE pagedkv_internal)
if(PAGEDKV_HAVE_CUDA)
  add_executable(benchmark_transfer_pieces EXCLUDE_FROM_ALL "${PROJECT_SOURCE_DIR}/benchmarks/transfer_pieces.cc")
  target_link_libraries(benchmark_transfer_pieces PRIVATE pagedkv_internal)
endif()

# example.quickstart_c, example.quickstart_cpp: they end well and print what they should.
set(example_output_c "request 1: *96 of 100 prompt tokens are cached")
set(example_output_cpp "101 and 101 tokens in 8 blocks, 1 of them copied")
foreach(language IN ITEMS c cpp)
  set(name example_quickstart_${language})
  add_executable(${name} "${PROJECT_SOURCE_DIR}/examples/quickstart.${language}")
  target_compile_options(${name} PRIVATE ${strict_options})
  target_link_libraries(${name} PRIVATE pagedkv m)
  set_target_properties(${name} PROPERTIES C_EXTENSIONS OFF)
  set_target_properties(${name} PROPERTIES C_EXTENSIONS OFF ${sanitized_c})
  add_test(NAME example.quickstart_${language}
           COMMAND sh -c [=[out=$("$0") && echo "$out" && echo "$out" | grep -q "$1"]=]
                   $<TARGET_FILE:${name}> "${example_output_${language}}")
endforeach()

# fuzz.cache: the fuzz target with a main function of its own, on random bytes for some seconds. With clang and
# PAGEDKV_SANITIZE=address,undefined,fuzzer-no-link it becomes a program of libFuzzer, which ctest does not run.
file(GLOB fuzz_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/fuzz/*.cc")
list(FILTER fuzz_sources EXCLUDE REGEX "/main.cc$")
add_executable(fuzz_cache ${fuzz_sources})
target_compile_options(fuzz_cache PRIVATE -Wall -Wextra)
target_link_libraries(fuzz_cache PRIVATE pagedkv)
if(PAGEDKV_SANITIZE MATCHES "fuzzer-no-link")
  target_link_options(fuzz_cache PRIVATE -fsanitize=fuzzer)
else()
  target_sources(fuzz_cache PRIVATE "${PROJECT_SOURCE_DIR}/tests/fuzz/main.cc")
  add_test(NAME fuzz.cache COMMAND fuzz_cache --seed 1 --seconds 4)
endif()
