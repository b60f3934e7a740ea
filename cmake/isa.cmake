# Kernels named *_isa.cpp are compiled once per instruction set; see csrc/core/isa.h.
set(VL_ISA_FLAGS_portable "")
set(VL_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(VL_ISA_FLAGS_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c)
set(VL_ISA_FLAGS_avx512_bf16 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mavx512bf16
                             -mavx512vnni)
set(VL_ISA_FLAGS_amx -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mavx512bf16 -mavx512vnni
                     -mamx-tile -mamx-bf16)

# vl_add_isa_sources(<target> [ISAS <isa>...] SOURCES <source>...): adds the sources' objects of each
# of the instruction sets (portable avx2 avx512, which every kernel has) to the target.
function(vl_add_isa_sources target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "ISAS;SOURCES")
  if(NOT arg_ISAS)
    set(arg_ISAS portable avx2 avx512)
  endif()
  foreach(isa ${arg_ISAS})
    set(objects ${target}_${isa})
    add_library(${objects} OBJECT ${arg_SOURCES})
    target_compile_definitions(${objects} PRIVATE VL_ISA=${isa} VL_ISA_${isa}=1)
    # -fno-math-errno -fno-trapping-math let loops vectorise; neither changes a result.
    # -ffp-contract=off: else two inlined copies of one expression may round differently, and a row's
    # bits would depend on which of them computed it.
    target_compile_options(${objects} PRIVATE -O3 -fno-math-errno -fno-trapping-math -ffp-contract=off
                                              ${VL_ISA_FLAGS_${isa}})
    target_include_directories(${objects} PRIVATE ${PROJECT_SOURCE_DIR}/csrc)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${objects}>)
  endforeach()
endfunction()
