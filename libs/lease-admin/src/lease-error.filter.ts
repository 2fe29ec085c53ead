import { InvalidJobError, LeaseholdError, UnknownJobError } from '@leasehold/nestjs';
import { type ArgumentsHost, Catch, type ExceptionFilter, HttpStatus } from '@nestjs/common';
import { HttpAdapterHost } from '@nestjs/core';

const STATUS: Record<string, HttpStatus> = {
  INVALID_JOB: HttpStatus.BAD_REQUEST,
  INVALID_OPTION: HttpStatus.BAD_REQUEST,
  UNKNOWN_JOB: HttpStatus.NOT_FOUND,
  ILLEGAL_TRANSITION: HttpStatus.CONFLICT,
  JOB_CONTENDED: HttpStatus.CONFLICT,
  NOT_RUNNING: HttpStatus.SERVICE_UNAVAILABLE,
  QUERY_TIMEOUT: HttpStatus.GATEWAY_TIMEOUT,
};

/** Answers Leasehold's own errors with `{ code, message, … }`; all others are left to the application. */
@Catch(LeaseholdError)
export class LeaseErrorFilter implements ExceptionFilter<LeaseholdError> {
  constructor(private readonly adapterHost: HttpAdapterHost) {}

  catch(error: LeaseholdError, host: ArgumentsHost): void {
    const body = {
      code: error.code,
      message: error.message,
      ...(error instanceof InvalidJobError ? { field: error.field } : {}),
      ...(error instanceof UnknownJobError ? { jobId: error.jobId } : {}),
    };
    const status = STATUS[error.code] ?? HttpStatus.INTERNAL_SERVER_ERROR;
    this.adapterHost.httpAdapter.reply(host.switchToHttp().getResponse(), body, status);
  }
}
