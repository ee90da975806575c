# The CUDA backend: object libraries per tier, linked into libgdn with a static cudart. Nothing here needs a GPU or its
# driver, neither to build nor to load the library.
set(GDN_CUDA "AUTO" CACHE STRING "CUDA backend: ON, OFF, or AUTO (built when nvcc is found)")
set_property(CACHE GDN_CUDA PROPERTY STRINGS AUTO ON OFF)
set(GDN_CUDA_ARCHITECTURES "75;80;86;89;90a;100;120" CACHE STRING
    "GPUs to build for (compute capabilities, e.g. 80;90a), or native. PTX of the newest is included.")

set(GDN_CUDA_FOUND OFF)
if(GDN_CUDA STREQUAL "AUTO")
  if(NOT CMAKE_CROSSCOMPILING AND NOT GDN_SANITIZE)
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      set(GDN_CUDA_FOUND ON)
    endif()
  endif()
elseif(GDN_CUDA)
  set(GDN_CUDA_FOUND ON)
endif()
if(NOT GDN_CUDA_FOUND)
  message(STATUS "CUDA backend: not built (GDN_CUDA=${GDN_CUDA})")
  return()
endif()

set(CMAKE_CUDA_ARCHITECTURES OFF)  # the compiler's own default, for its test; the targets below name theirs
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # older CMake does not know that nvcc has it
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
find_package(CUDAToolkit REQUIRED)

if(GDN_CUDA_ARCHITECTURES STREQUAL "native")
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE _gdn_caps RESULT_VARIABLE _gdn_smi ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT _gdn_smi EQUAL 0)
    message(FATAL_ERROR "GDN_CUDA_ARCHITECTURES=native: nvidia-smi names no GPU on this machine")
  endif()
  string(REPLACE "." "" _gdn_caps "${_gdn_caps}")
  string(REGEX REPLACE "[\r\n ]+" ";" _gdn_archs "${_gdn_caps}")
  list(REMOVE_DUPLICATES _gdn_archs)
  list(TRANSFORM _gdn_archs REPLACE "^90$" "90a")
else()
  set(_gdn_archs ${GDN_CUDA_ARCHITECTURES})
endif()

# Kernels for any GPU run on an H100 as sm_90a code as well as sm_90 code. The newest PTX serves later GPUs; code for an
# exact architecture ("a") has no PTX that another could run.
set(_gdn_newest)
set(_gdn_gencode)
set(_gdn_names)
set(_gdn_has_sm90 OFF)
foreach(arch ${_gdn_archs})
  if(NOT arch MATCHES "^[0-9]+a?$")
    message(FATAL_ERROR "GDN_CUDA_ARCHITECTURES: found '${arch}', expected compute capabilities such as 80 or 90a, or native")
  endif()
  list(APPEND _gdn_gencode "-gencode=arch=compute_${arch},code=sm_${arch}")
  list(APPEND _gdn_names ${arch}-real)
  if(arch STREQUAL "90a")
    set(_gdn_has_sm90 ON)
  elseif(NOT arch MATCHES "a$")
    set(_gdn_newest ${arch})
  endif()
endforeach()
if(_gdn_newest)
  list(APPEND _gdn_gencode "-gencode=arch=compute_${_gdn_newest},code=compute_${_gdn_newest}")
  list(APPEND _gdn_names ${_gdn_newest}-virtual)
endif()
string(REPLACE ";" " " GDN_CUDA_ARCH_NAMES "${_gdn_names}")

add_library(gdn_cuda_flags INTERFACE)
target_include_directories(gdn_cuda_flags INTERFACE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
# Compressed, because a library for every architecture is large; source lines are for profiling only.
option(GDN_CUDA_LINEINFO "Source lines in the device code, for profilers" OFF)
set(_gdn_compress -Xfatbin=-compress-all)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
  set(_gdn_compress --compress-mode=size)
endif()
target_compile_options(gdn_cuda_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -O3 ${_gdn_compress} $<$<BOOL:${GDN_CUDA_LINEINFO}>:-lineinfo>
      -Xcompiler=-Wall,-Wextra
      $<$<BOOL:${GDN_WERROR}>:-Werror=all-warnings>>)

set(GDN_CUDA_OBJECTS)
function(gdn_add_cuda_tier name gencode sources)
  add_library(gdn_cuda_${name} OBJECT ${sources})
  target_link_libraries(gdn_cuda_${name} PRIVATE gdn_cuda_flags)
  target_include_directories(gdn_cuda_${name} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  target_compile_options(gdn_cuda_${name} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${gencode}>")
  set_target_properties(gdn_cuda_${name} PROPERTIES CUDA_ARCHITECTURES OFF CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON
                        CUDA_EXTENSIONS OFF CUDA_RUNTIME_LIBRARY Static)
  set(GDN_CUDA_OBJECTS ${GDN_CUDA_OBJECTS} $<TARGET_OBJECTS:gdn_cuda_${name}> PARENT_SCOPE)
endfunction()

file(GLOB _gdn_simt CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cuda/simt/*.cu)
gdn_add_cuda_tier(simt "${_gdn_gencode}" "${_gdn_simt}")
set(GDN_CUDA_DEFS GDN_HAVE_CUDA)

# Tensor cores by mma.sync: every architecture from 80 on.
set(_gdn_sm80_archs ${_gdn_archs})
list(FILTER _gdn_sm80_archs EXCLUDE REGEX "^7[0-9]a?$")
if(_gdn_sm80_archs)
  set(_gdn_sm80_gencode ${_gdn_gencode})
  list(FILTER _gdn_sm80_gencode EXCLUDE REGEX "compute_7[0-9]")
  file(GLOB _gdn_sm80 CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cuda/sm80/*/*.cu)
  gdn_add_cuda_tier(sm80 "${_gdn_sm80_gencode}" "${_gdn_sm80}")
  list(APPEND GDN_CUDA_DEFS GDN_HAVE_CUDA_SM80)
endif()

file(GLOB _gdn_sm90 CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cuda/sm90/*/*.cu ${PROJECT_SOURCE_DIR}/src/cuda/sm90/*/*.cpp)
if(_gdn_has_sm90 AND EXISTS ${PROJECT_SOURCE_DIR}/src/cuda/sm90/chunk_forward/launch.cu)
  gdn_add_cuda_tier(sm90 "-gencode=arch=compute_90a,code=sm_90a" "${_gdn_sm90}")
  list(APPEND GDN_CUDA_DEFS GDN_HAVE_CUDA_SM90)
endif()

# Host code, compiled by the C++ compiler with its own warnings.
add_library(gdn_cuda_host OBJECT src/cuda/architectures.cpp src/cuda/device.cpp src/cuda/workspace.cpp
            src/cuda/common/rule_params.cpp)
target_link_libraries(gdn_cuda_host PRIVATE gdn_flags)
target_include_directories(gdn_cuda_host SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
target_compile_definitions(gdn_cuda_host PRIVATE GDN_HAVE_CUDA "GDN_CUDA_ARCHS=\"${GDN_CUDA_ARCH_NAMES}\"")
target_compile_options(gdn_cuda_host PRIVATE -O2)
list(APPEND GDN_CUDA_OBJECTS $<TARGET_OBJECTS:gdn_cuda_host>)
foreach(tier simt sm80 sm90)
  if(TARGET gdn_cuda_${tier})
    target_compile_definitions(gdn_cuda_${tier} PRIVATE ${GDN_CUDA_DEFS})
  endif()
endforeach()
message(STATUS "CUDA backend: ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION}, ${GDN_CUDA_ARCH_NAMES}")
