# One extension module for each python/pagedkv/*.pyx. They cimport each other's .pxd files and pagedkv.abi.
find_package(Cython REQUIRED)  # of the Python package cython-cmake
include(UseCython)

file(GLOB pyx_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/python/pagedkv/*.pyx")
# Cython's dependency file leaves out what is taken by "from pagedkv cimport abi", so every .pxd is named here.
file(GLOB pxd_files CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/python/pagedkv/*.pxd")
foreach(pyx IN LISTS pyx_sources)
  get_filename_component(module "${pyx}" NAME_WE)
  cython_transpile("${pyx}" LANGUAGE C MODULE_NAME pagedkv.${module} INCLUDE_DIRECTORIES python
                   OUTPUT_VARIABLE generated DEPENDS ${pxd_files})
  if(SKBUILD_SABI_VERSION)
    python_add_library(${module} MODULE USE_SABI ${SKBUILD_SABI_VERSION} WITH_SOABI "${generated}")
  else()
    python_add_library(${module} MODULE WITH_SOABI "${generated}")
  endif()
  target_link_libraries(${module} PRIVATE pagedkv)
  set_target_properties(${module} PROPERTIES
    INSTALL_RPATH "$ORIGIN/lib" BUILD_RPATH_USE_ORIGIN ON
    LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/python/pagedkv")
  install(TARGETS ${module} LIBRARY DESTINATION pagedkv COMPONENT python)
endforeach()
