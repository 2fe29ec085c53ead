import { InvalidJobError } from '@leasehold/nestjs';
import { ValidationPipe } from '@nestjs/common';

/** Checks a query against its DTO; unknown parameters are refused too, for a misspelt filter would show everything. */
export const queryPipe = (): ValidationPipe =>
  new ValidationPipe({
    transform: true,
    whitelist: true,
    forbidNonWhitelisted: true,
    exceptionFactory: (errors) => {
      const texts = errors.flatMap(({ constraints }) => Object.values(constraints ?? {}));
      return new InvalidJobError(texts.join('; ') || 'the query is malformed', errors[0]?.property ?? 'query');
    },
  });
