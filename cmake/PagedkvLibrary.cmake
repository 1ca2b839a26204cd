# Targets: pagedkv_objects, every object of the library, and pagedkv, the shared library made of them.
file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/libpagedkv/*.cc")
list(FILTER sources EXCLUDE REGEX "/libpagedkv/backend/cuda/")

add_library(pagedkv_objects OBJECT)
target_include_directories(pagedkv_objects PUBLIC "${PROJECT_SOURCE_DIR}/libpagedkv" "${PROJECT_SOURCE_DIR}/include")
target_compile_options(pagedkv_objects PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>")
target_link_libraries(pagedkv_objects PUBLIC Threads::Threads ${CMAKE_DL_LIBS})

# Host kernels: one source per instruction set, chosen among at run time.
include(CheckCXXCompilerFlag)
set(isa_options_avx2 -mavx2 -mfma -mf16c)
set(isa_options_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mavx2)
set(isa_options_avx512bf16 ${isa_options_avx512} -mavx512bf16 -mavx512vbmi)
set(isa_options_amx ${isa_options_avx512bf16} -mamx-tile -mamx-bf16)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  foreach(isa IN ITEMS avx512 avx512bf16 amx)
    list(APPEND isa_options_${isa} -Wno-uninitialized -Wno-maybe-uninitialized)  # of its own avx512fintrin.h, in vain
  endforeach()
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(isa_options_neon -fno-schedule-insns)  # it brings loads so far forward that sums no longer fit into registers
endif()
set(isas_possible)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(isas_possible avx2 avx512 avx512bf16)
  check_cxx_compiler_flag("-mamx-tile -mamx-bf16" PAGEDKV_HAVE_AMX_OPTIONS)
  if(PAGEDKV_HAVE_AMX_OPTIONS AND CMAKE_SYSTEM_NAME STREQUAL Linux)
    list(APPEND isas_possible amx)
  endif()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64|ARM64)$")
  set(isas_possible neon)
endif()
foreach(isa IN ITEMS avx2 avx512 avx512bf16 amx neon)
  set(source "${PROJECT_SOURCE_DIR}/libpagedkv/backend/host/isa_${isa}.cc")
  if(NOT source IN_LIST sources)
    continue()
  endif()
  if(isa IN_LIST isas_possible)
    set_source_files_properties("${source}" PROPERTIES COMPILE_OPTIONS "${isa_options_${isa}}")
    string(TOUPPER ${isa} ISA)
    target_compile_definitions(pagedkv_objects PUBLIC PKV_HAVE_${ISA}=1)
  else()
    list(REMOVE_ITEM sources "${source}")
  endif()
endforeach()

# Pairs of words made one by one and then handled as a vector wait for their way through the store buffer.
set_source_files_properties("${PROJECT_SOURCE_DIR}/libpagedkv/cache/settle.cc" PROPERTIES
                            COMPILE_OPTIONS "-fno-tree-slp-vectorize")

if(PAGEDKV_HAVE_CUDA)
  file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/libpagedkv/backend/cuda/*.cc"
       "${PROJECT_SOURCE_DIR}/libpagedkv/backend/cuda/*.cu")
  list(APPEND sources ${cuda_sources})
  # The one source that asks.
  set_source_files_properties("${PROJECT_SOURCE_DIR}/libpagedkv/backend/backend.cc" PROPERTIES
                              COMPILE_DEFINITIONS PKV_HAVE_CUDA=1)
  if("${CMAKE_CUDA_ARCHITECTURES}" MATCHES "90a")  # the kernel of which other architectures compile an empty one
    set_source_files_properties("${PROJECT_SOURCE_DIR}/libpagedkv/backend/cuda/prefill.cu" PROPERTIES
                                COMPILE_DEFINITIONS PKV_HAVE_SM90A=1)
  endif()
  # What takes longest is built first, so that no processor is left alone with one of them.
  set(long_sources ${cuda_sources})
  list(FILTER long_sources INCLUDE REGEX "/(attend_b?f16|prefill|write_kv).*\\.cu$")
  list(REMOVE_ITEM sources ${long_sources})
  list(PREPEND sources ${long_sources})
  target_link_libraries(pagedkv_objects PUBLIC pagedkv_cudart)
  target_compile_options(pagedkv_objects PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-t2>")
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)  # a fatal error in an older nvcc
    target_compile_options(pagedkv_objects PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-compress-mode=size>")
  endif()
  set_target_properties(pagedkv_objects PROPERTIES CUDA_RUNTIME_LIBRARY None)  # pagedkv_cudart brings it
endif()
target_sources(pagedkv_objects PRIVATE ${sources})

set(exports "${PROJECT_SOURCE_DIR}/libpagedkv/exports.map")
add_library(pagedkv SHARED $<TARGET_OBJECTS:pagedkv_objects>)
add_library(pagedkv::pagedkv ALIAS pagedkv)
target_include_directories(pagedkv PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>)
target_link_libraries(pagedkv PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
if(PAGEDKV_HAVE_CUDA)
  target_link_libraries(pagedkv PRIVATE $<BUILD_INTERFACE:pagedkv_cudart>)
endif()
target_link_options(pagedkv PRIVATE "LINKER:--version-script=${exports}" "LINKER:--exclude-libs,ALL")
if(NOT PAGEDKV_SANITIZE)  # what clang's sanitizers call is in the program, not in the library
  target_link_options(pagedkv PRIVATE "LINKER:-z,defs")
endif()
set_target_properties(pagedkv PROPERTIES LINKER_LANGUAGE CXX LINK_DEPENDS "${exports}" CUDA_RUNTIME_LIBRARY None)
